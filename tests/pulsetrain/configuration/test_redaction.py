"""Files that describe a run hold no credentials, and nothing else is taken out of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.handlers.run_files.redaction import REDACTED, redacted, redacted_settings
from tests.support.programs_command_line import train

SECRET = "hunter2hunter2hunter2hunter2hunter2"


@pytest.mark.parametrize(
    "value",
    [
        {name: SECRET}
        for name in (
            "password", "db_password", "passwd", "passphrase", "secret", "client_secret", "token", "HF_TOKEN",
            "hfToken", "api_key", "apikey", "apiKey", "auth_token",
            "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "private_key", "webhook",
            "webhook_url", "sentry_dsn", "Authorization", "init_args.token", "credentials",
        )
    ]
    + [
        {"service": {"nested": [{"password": SECRET}]}},
        {"passwords_file": {"password": [SECRET, SECRET]}},
        f"https://me:{SECRET}@host/path", f"postgresql://me:{SECRET}@host:5432/db", f"https://{SECRET}@github.com/a/b",
        f"https://host/path?a=1&token={SECRET}&b=2", f"https://host/?api_key={SECRET}",
        f"--data.init_args.token={SECRET}", f"--password={SECRET} {SECRET}", ["train", "--token", SECRET],
        f"--handlers=[{{class_path: Alert, init_args: {{webhook: https://host/{SECRET}}}}}]",
        f'--data={{"password": "{SECRET}"}}', f"PASSWORD={SECRET}",
        "hf_" + "a1B2" * 8, "sk-" + "a1B2" * 8, "ghp_" + "a1B2" * 9, "AKIA" + "A1B2" * 4, "prefix sk-" + "a1B2" * 8,
    ],
)  # fmt: skip
def test_a_credential_is_taken_out(value: object) -> None:
    text = json.dumps(redacted(value))
    assert REDACTED in text
    assert SECRET not in text
    assert "a1B2" not in text
    assert "A1B2" not in text


@pytest.mark.parametrize(
    "value",
    [
        {"tokens": 50, "max_tokens": "50", "tokenizer": "bytes", "token_count": 3, "eos_token": "</s>"},
        {"key": "val/loss", "key_order": "a", "monkey": "b", "keyboard": "c", "sort_key": "loss", "keys": ["a"]},
        {"token": 7, "password": None, "secret": "", "author": "me", "passes": "2", "compass": "x", "secretary": "y"},
        "https://host/path?page=2#part", "ssh://host:22/a", "s3://bucket/key", "me@host", "C:\\data", "10:30:00",
        ["train", "config.yaml", "--training.learning_rate=3e-4", "--max_tokens", "50", "a=b"],
        "Accumulate(tokens=50)", "the token is counted", "a.b: c", "skip-this", "hf_small",
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
