"""What of a run's texts is a credential stays outside of its archive."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.handlers.run_files.redaction import redacted
from pulsetrain.runs.archive import unpacked, write_archive
from pulsetrain.runs.credentials import without_credentials
from tests.support.run_folders import BEGUN, write_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "runs" / "a", [1.0, 0.5])
    CheckpointManager(folder / "checkpoints").save({"step": 5}, step=5)
    return folder


def test_credentials_links_and_owners_stay_outside(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    secret = "hf_" + "aB3" * 10
    (run / "notes.txt").write_text(f"used {secret} for it\n")
    (run / "config.yaml").write_text(f"data:\n  api_key: {secret}\ntraining:\n  max_epochs: 4\n")
    (run / ".env").write_text(f"TOKEN={secret}\n")
    (run / "id_rsa").write_text("private")
    os.symlink("/etc/hostname", run / "host")
    os.symlink("/etc", run / "etc")
    assert main(["archive", "runs/a"]) == 0
    said = capsys.readouterr().err
    for each in (
        ".env: credentials",
        "id_rsa: credentials",
        "host: a link",
        "etc: a link",
        "notes.txt: credentials were",
    ):
        assert each in said
    with zipfile.ZipFile("a.run.zip") as file:
        assert all(secret.encode() not in file.read(name) for name in file.namelist())
        assert not {Path(name).name for name in file.namelist()} & {".env", "id_rsa", "host", "hostname"}
    assert "max_epochs: 4" in (unpacked(Path("a.run.zip")) / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.py", 'API_KEY = "{}"\n'), ("start.sh", "export API_KEY={}\n"), ("code/set.ini", "password={}\n"),
        ("code/more.yml", "password: {}\n"), ("code/more.yaml", "a:\n- api_key: {}\n"),
        ("crash/more.json", '{{"api_key": "{}"}}'), ("lines.jsonl", '{{"api_key": "{}"}}\n{{}}\n'), ("noext", "{}\n"),
        ("two.yaml", "a: 1\n---\npassword: {}\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", [b"", b"\xff\xe4"])
def test_credentials_in_any_text_are_replaced(name: str, text: str, before: bytes, run: Path):
    secret = "hf_" + "aB3" * 10
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes((b"# " + before + b"\n" if before else b"") + text.format(secret).encode())
    assert main(["archive", "runs/a"]) == 0
    with zipfile.ZipFile("a.run.zip") as file:
        kept = file.read(f"a/{name}")
    assert secret.encode() not in kept
    assert b"[redacted]" in kept
    assert before in kept


def test_credentials_in_a_long_text_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    secret = "hf_" + "aB3" * 10
    lines = [f"line {number}: {secret if number % 100 == 0 else 'nothing'}\n" for number in range(1000)]
    (tmp_path / "a.log").write_text("".join(lines))
    monkeypatch.setattr("pulsetrain.runs.credentials.LONGEST_PARSED", 777)
    changed = without_credentials(tmp_path / "a.log")
    assert changed == "".join(lines).replace(secret, "[redacted]").encode()


def test_a_private_key_in_a_long_text_is_replaced_as_a_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    key = "-----BEGIN PRIVATE KEY-----\n" + "MIIEvQ\n" * 40 + "-----END PRIVATE KEY-----"
    (tmp_path / "a.log").write_text(f"begins\n{key}\nends\n")
    monkeypatch.setattr("pulsetrain.runs.credentials.LONGEST_PARSED", 100)
    assert without_credentials(tmp_path / "a.log") == b"begins\n[redacted]\nends\n"


SECRET = "hf_" + "aB3" * 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"lr: 1  # old token: {SECRET}\n", "lr: 1  # old token: [redacted]\n"),
        ("# password: hunter2\nlr: 1\n", "# password: [redacted]\nlr: 1\n"),
        ("a: 1\n---\npassword:\n  - hunter2\n---\nb: 2  # as before\n",
         "a: 1\n---\npassword:\n- '[redacted]'\n---\nb: 2  # as before\n"),
        ("password: |\n  hunter2\n", "password: '[redacted]'\n"),
    ],
)  # fmt: skip
def test_credentials_in_comments_and_documents_of_yaml_are_replaced(text: str, expected: str, tmp_path: Path):
    (tmp_path / "a.yaml").write_text(text)
    assert without_credentials(tmp_path / "a.yaml") == expected.encode()


@pytest.mark.parametrize("text", ["api_key: null  # none\n", "password:\nlr: 1\n", "a: '# no comment'\n"])
def test_yaml_without_credentials_stays_as_it_is(text: str, tmp_path: Path):
    (tmp_path / "a.yaml").write_text(text)
    assert without_credentials(tmp_path / "a.yaml") is None


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize(("name", "text"), [("a.txt", "used token=%s, ä\r\n"), ("a.yaml", "token: %s\n")])
def test_credentials_in_a_text_with_a_byte_order_mark_are_replaced(name: str, text: str, encoding: str, tmp_path: Path):
    (tmp_path / name).write_bytes(("\ufeff" + text % SECRET).encode(encoding))
    changed = without_credentials(tmp_path / name)
    assert changed is not None
    expected = "\ufeff" + text % "[redacted]" if name == "a.txt" else "\ufefftoken: '[redacted]'\n"
    assert changed.decode(encoding) == expected


def test_credentials_in_an_output_that_begins_with_zeros_are_replaced(tmp_path: Path):
    (tmp_path / "job.txt").write_bytes(b"\0" * 100 + b"password=hunter2\n")  # truncated while it was written
    assert without_credentials(tmp_path / "job.txt") == b"\0" * 100 + b"password=[redacted]\n"


@pytest.mark.parametrize("secret", [SECRET, "-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END"])
def test_tokens_in_a_binary_file_are_replaced_by_as_many_bytes(secret: str, tmp_path: Path):
    (tmp_path / "state.db").write_bytes(b"\x89\0\xff" * 50_000 + secret.encode() + b"\0\xff task-" + b"a" * 30)
    expected = b"[redacted]" + b"*" * (len(secret) - 10)
    changed = without_credentials(tmp_path / "state.db")
    assert changed == b"\x89\0\xff" * 50_000 + expected + b"\0\xff task-" + b"a" * 30
    (tmp_path / "state.db").write_bytes(b"\x89\0\xff task-" + b"a" * 30)
    assert without_credentials(tmp_path / "state.db") is None


def test_a_checkpoint_with_a_credential_is_not_archived(run: Path):
    (checkpoint,) = list((run / "checkpoints").glob("0*"))[-1:]
    (checkpoint / "notes.json").write_text('{"api_key": "%s"}' % ("hf_" + "aB3" * 10))
    with pytest.raises(RunFolderError, match="archive the run with --checkpoints none"):
        write_archive(run, Path("a.zip"), checkpoints="all")
    assert write_archive(run, Path("a.zip"), checkpoints="none").files


def test_a_log_with_a_credential_is_not_archived(tmp_path: Path):
    secret = "hf_" + "aB3" * 10
    run = write_run(tmp_path / "a", [1.0], "terminate", reason=f"no access with {secret}")
    with pytest.raises(
        RunFolderError, match=r"event \d+ \(terminate\) of rank 0 has a value that is a credential"
    ) as said:
        write_archive(run, tmp_path / "a.zip")
    assert secret not in str(said.value)
    assert not (tmp_path / "a.zip").exists()


def test_a_credential_in_the_error_of_a_receiver_is_found(tmp_path: Path):
    writer = LogWriter(tmp_path / "a" / "events")
    error = {"__type__": "builtins.OSError", "message": "no access with hf_" + "aB3" * 10}
    writer.add(LoggedEvent(0, "trainer", "epoch_completed", epoch=1, error=error, seq=0, t=BEGUN))
    writer.close()
    with pytest.raises(RunFolderError, match=r"event 0 \(epoch_completed\) of rank 0 has a value that is a credential"):
        write_archive(tmp_path / "a", tmp_path / "a.zip")


@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
def test_a_text_that_nests_without_end_is_searched_as_a_text(name: str, run: Path):
    secret = "hf_" + "aB3" * 10
    (run / name).write_text("[" * 100_000 + secret)
    assert without_credentials(run / name) == b"[" * 100_000 + b"[redacted]"


@pytest.mark.parametrize("kept", ["payload", "output", "metrics", "observed", "lr", "error"])
def test_a_value_whose_name_says_that_it_is_a_credential_is_found(kept: str, tmp_path: Path):
    writer = LogWriter(tmp_path / "a" / "events")
    value = {kept: {"connection": {"password": "sesame", "port": 22}}}
    writer.add(LoggedEvent(0, "trainer", "connected", epoch=1, seq=0, t=BEGUN, **value))
    writer.close()
    with pytest.raises(RunFolderError, match=r"event 0 \(connected\) of rank 0 has a value that is a credential"):
        write_archive(tmp_path / "a", tmp_path / "a.zip")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["train.py", "--token", "zzsecret"], ["train.py", "--token", "[redacted]"]),
        (["--token=supersecretvalue", "--pad-token", "cls"], ["--token=[redacted]", "--pad-token", "cls"]),
        ("env TOKEN=supersecretvalue python a.py", "env TOKEN=[redacted] python a.py"),
        ("train.py --token zzsecret --seed 1", "train.py --token [redacted] --seed 1"),
        ({"github_pat": "a8F3kd92LLq0x"}, {"github_pat": "[redacted]"}),
        ({"token": "cls", "pattern": "a8F3kd92LLq0x"}, {"token": "cls", "pattern": "a8F3kd92LLq0x"}),
    ],
)
def test_what_follows_an_option_or_a_variable_named_token_is_a_credential(value: object, expected: object):
    assert redacted(value) == expected


def test_credentials_in_files_beside_the_log_are_replaced(run: Path):
    log = (run / "events" / "events.jsonl.zst").read_bytes()
    (run / "events" / "notes.txt").write_text(f"used {SECRET}\n")
    archived = write_archive(run, Path("a.zip"))
    assert archived.redacted == ["events/notes.txt"]
    with zipfile.ZipFile("a.zip") as file:
        assert file.read("a/events/notes.txt") == b"used [redacted]\n"
        assert file.read("a/events/events.jsonl.zst") == log


def test_a_report_stays_as_it_is(run: Path):
    pytest.importorskip("plotly")
    assert main(["report", "runs/a", "--into", "runs/a/report.html"]) == 0
    assert without_credentials(run / "report.html") is None
