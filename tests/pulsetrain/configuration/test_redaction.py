"""Files that describe a run hold no credentials, and nothing else is taken out of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.handlers.run_files.redaction import REDACTED, redacted, redacted_settings
from tests.support.programs_command_line import train

SECRET = "hunter2hunter2hunter2hunter2hunter2"


S = "S3cr3tV4lue"
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{S}\n-----END RSA PRIVATE KEY-----"

NAMES = (
    "password", "passwords", "db_password", "dbpassword", "PGPASSWORD", "password2", "passwd", "passphrase", "passcode",
    "pwd", "MYSQL_PWD", "pass", "db_pass", "pw", "secret", "secrets", "client_secret", "AWS_SECRET_ACCESS_KEY",
    "token", "tokens", "token2", "token_1", "HF_TOKEN", "hfToken", "apitoken", "auth_token", "refresh_tokens",
    "bot_token", "sas_token", "aws_session_token", "init_args.token", "first_token", "api_key", "apikey", "APIKEY",
    "apiKey", "api_keys", "api_key_2", "X-Api-Key", "WANDB_API_KEY", "wandb_key", "openai_key", "license_key",
    "master_key", "private_key", "account_key", "aws_access_key_id", "key", "auth", "basic_auth", "bearer", "jwt",
    "session", "sas", "cookie", "webhook", "webhook_url", "sentry_dsn", "Authorization", "credentials",
)  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [S, SECRET, f"-{S}", [S], ["user", S], (S, S), {"value": S}, {"a": {"b": [S]}}],
    ids=["text", "long", "minus", "list", "pair", "tuple", "mapping", "nested"],
)
def test_a_value_with_the_name_of_a_credential_is_taken_out(value: object) -> None:
    found = {name: redacted({name: value}) for name in NAMES}
    texts = {name: json.dumps(each) for name, each in found.items()}
    assert [name for name, text in texts.items() if REDACTED not in text or S in text or SECRET in text] == []
    assert [name for name, each in found.items() if not list(redacted_settings(each))] == []
    assert redacted(found) == found


@pytest.mark.parametrize(
    "form",
    [
        "{}={}", "--{}={}", "--data.{}={}", "a b {}={} c", "{}: {}", "a {}: {}, b", "{{'{}': '{}'}}",
        '--data={{"{}": "{}"}}', "--x=[{{class_path: A, init_args: {{{}: {}}}}}]", "train --{} {} --b",
        "a({}=b'{}')", "{}: SecretStr('{}')", "{} => {}", "{} := {}", '\\"{}\\": \\"{}\\"',
        "https://host/a?b=1&{}={}&c=2", 'x {}="a b {}" c', "{}: [a, {}]", "{}: {{a: {{b: {}}}}}",
    ],
)  # fmt: skip
def test_so_is_one_with_its_name_in_a_text(form: str) -> None:
    found = [redacted(form.format(name, S)) for name in NAMES]
    assert [text for text in found if REDACTED not in text or S in text] == []
    assert [redacted(text) for text in found] == found


@pytest.mark.parametrize(
    "value",
    [
        ["--wandb.key", S], {"data.hub.token": S},
        ["train", "--token", S], ["train", "--password", f"-{S}"], ["--password", f":{S}"], f"--password={S} {S}",
        f"Authorization: Bearer {S}", [f"Authorization: Bearer {S}"], f"curl -H 'Authorization: Bearer {S}' https://host",
        f'curl -H "Authorization: Basic {S}="', f"Authorization: AWS4 Credential=a, Signature={S}", f"Bearer {S}",
        f"Cookie: a=1; b={S}", {"headers": {"Authorization": f"Bearer {S}"}},
        f"https://me:{S}@host/path", f"https://{S}@host/path", f"https://me:a/{S}@host/x", f"https://me:{S}/b@host/x",
        f"https://me:a@{S}@host/x", f"postgresql+psycopg2://me:{S}@host:5432/db", f"redis://:{S}@host",
        f"see https://me:{S}@host and s3://k:{S}@bucket", f"me:{S}@host:/path", f"me:{S}@host",
        f"https://host/?sig={S}", f"https://host/?key={S}", f"https://host/a?X-Amz-Signature={S}&b=1",
        f"https://host/?X-Amz-Credential={S}", f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={S};Suffix=b",
        f"https://hooks.slack.com/services/T00/B00/{S}", f"https://discord.com/api/webhooks/1/{S}",
        f"https://api.telegram.org/bot1:{S}/send", PEM, f"a {PEM} b", f"-----BEGIN PRIVATE KEY-----\n{S}",
        {f"https://me:{S}@host": 1}, {f"Bearer {S}": 1}, {PEM: 1},
        "hf_" + "a1B2" * 8, "sk-" + "a1B2" * 8, "ghp_" + "a1B2" * 9, "AKIA" + "A1B2" * 4, "prefix sk-" + "a1B2" * 8,
        {"hf_" + "a1B2" * 8: 1},
    ],
)  # fmt: skip
def test_so_is_one_with_the_form_of_a_credential(value: object) -> None:
    found = redacted(value)
    text = json.dumps(found)
    assert REDACTED in text
    assert S not in text
    assert "a1B2" not in text
    assert "A1B2" not in text
    assert redacted(found) == found
    assert list(redacted_settings({"x": found})) != []


def test_so_is_a_number_under_the_name_of_a_credential() -> None:
    assert redacted({"password": 12345678, "pin": 3}) == {"password": REDACTED, "pin": 3}
    assert redacted({"passwords": [12345678]}) == {"passwords": [REDACTED]}


def test_the_class_of_an_object_with_such_a_name_is_kept() -> None:
    value = {"credentials": {"class_path": "my.Credentials", "init_args": {"user": "me"}}}
    assert redacted(value)["credentials"] == {"class_path": "my.Credentials", "init_args": {"user": REDACTED}}


@pytest.mark.parametrize(
    "value",
    [
        {"tokens": 50, "max_tokens": 5, "min_tokens": "50", "tokenizer": "bytes", "token_count": 3, "bos_token": "x"},
        {"pool_token": "cls", "class_token": "learned", "split_token": "|", "audio_token": "<|a_0|>", "token": "first"},
        {"pad_token": "[PAD]", "mask_token_id": "3", "tokens": ["<s>", "cls"], "eos_token": "</s>", "by_token": "sum"},
        {"key": "val/loss", "key_order": "a", "key_size": 64, "monkey": "b", "keyboard": "c", "sort_key": "loss"},
        {"keys": ["a"], "attention_key": "q", "feature_key": "layer4.0.conv2", "metric_key": "val/top5_accuracy"},
        {"key": "resnet50", "image_key": "layer4block2", "time_key": "2024-01-01", "public_keys": "a"},
        {"token": 7, "password": None, "secret": "", "author": "me", "passes": "2", "compass": "x", "secretary": "y"},
        {"auth": "oauth2", "pass": "second", "low_pass": "butter", "session": "a", "signature": "f(x)", "auths": True},
        {"password": False, "passwords_file": "x", "token_file": "/x", "cookie_cutter": "x", "secret_santa": "x"},
        {"git": {"commit": "0123456789abcdef0123456789abcdef01234567"}, "api": {"url": "https://host"}, "a": ("a", 1)},
        "https://host/path?page=2#part", "ssh://host:22/a", "ssh://git@host:22/a@b", "s3://bucket/key", "s3://bucket/a@b",
        "abfs://container@account.dfs.core.windows.net/a", "https://medium.com/@me/b", "http://[::1]:80/@x",
        "https://host/?email=me@host", "http://host:8080/a@b", "registry/image:24.1@sha256:abc", "mailto:me@host",
        "me@host", "me@host:/path", "C:\\data", "10:30:00", "val:recall@10", "-----BEGIN CERTIFICATE-----",
        ["train", "config.yaml", "--training.learning_rate=3e-4", "--max_tokens", "50", "--password", "--quiet", "a=b"],
        "Accumulate(tokens=50)", "the token is counted", "predict the next token: x", "per token: yes", "val/token=3",
        "token: float32 (3, 4)", "format: token:text", "if password == other", "secret://vault/a", "Bearer of news",
        "a.b: c", "skip-this", "hf_small", "a=" * 3000, "a:" * 3000,
    ],
)  # fmt: skip
def test_nothing_else_is_changed(value: object) -> None:
    assert redacted(value) == value
    assert list(redacted_settings(value)) == []


def test_no_file_of_a_run_holds_the_credentials_of_its_configuration(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("data.py").write_text(
        Path("data.py").read_text() + "\ndef private(token=None, url=None):\n    return loaders()\n"
    )
    url = f"https://me:{SECRET}@host/data"
    data = f"--data={{class_path: data.private, init_args: {{token: {SECRET}, url: '{url}'}}}}"
    handlers = "--handlers=[Checkpointer, EventRecorder, CSVLogger, CrashBundle]"
    assert train(data, handlers) == 0
    written = [path for path in Path("runs").rglob("*") if path.is_file()]
    assert len(written) > 5
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    assert REDACTED in Path("runs/tiny-1/config.yaml").read_text()
    capsys.readouterr()
    assert train(data, handlers, "--resume", "latest", "--training.max_epochs=3") == 0
    assert "data" not in capsys.readouterr().err.partition("configuration has changed")[2].partition("\n")[0]
    assert main(["verify", "runs/tiny-1"]) == 2
    assert "data.init_args.token" in capsys.readouterr().err
    again = [f"--data.init_args.token={SECRET}", f"--data.init_args.url={url}"]
    assert main(["fork", "runs/tiny-1", "--at", "5", "--into", "runs/forked", *again]) == 0, capsys.readouterr().err
    assert [path for path in Path("runs").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()] == []
