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
    monkeypatch.setattr("pulsetrain.runs.credentials._WHOLE", 777)
    changed = without_credentials(tmp_path / "a.log")
    assert changed == "".join(lines).replace(secret, "[redacted]").encode()


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


@pytest.mark.parametrize("kept", ["payload", "output"])
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
