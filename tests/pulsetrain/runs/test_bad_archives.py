"""Archives that are damaged, of another origin, or with names that are not as they should be."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.runs.archive import is_archive, summarize_archive, unpacked, write_archive
from tests.support.run_folders import content, write_run


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda data: data[:-200], "is not a run's archive, or is damaged"),
        (lambda data: data.replace(b"max_epochs", b"MAX_epochs"), "damaged"),
        (lambda data: b"text", "is not a run's archive, or is damaged"),
    ],
)
def test_a_damaged_archive_is_refused(harm, message: str, run: Path, tmp_path: Path):
    path = write_archive(run, tmp_path / "a.zip").path
    stored = tmp_path / "stored.zip"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(stored, "w") as target:  # so that texts can be found
        for name in source.namelist():
            target.writestr(name, source.read(name))
    stored.write_bytes(harm(stored.read_bytes()))
    with pytest.raises(RunFolderError, match=message):
        unpacked(stored)


def test_what_is_said_of_a_damaged_log_names_the_archive(tmp_path: Path):
    run = write_run(tmp_path / "run", [1.0] * 400)  # some of it is sealed in blocks
    log = run / "events" / "events.jsonl.zst"
    content = log.read_bytes()
    log.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    path = write_archive(run, tmp_path / "a.run.zip").path
    assert f"`pulsetrain events {path} --check` lists what is lost" in summarize_archive(path).reason
    assert main(["events", str(path), "--check"]) == 3


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil"])
def test_names_that_lead_elsewhere_are_refused(name: str, tmp_path: Path):
    path = tmp_path / "a.zip"
    files = {name: {"size": 4, "sha256": "0"}}
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("pulsetrain-archive.json", json.dumps({"format": 1, "run": "a", "id": "", "files": files}))
        file.writestr(f"a/{name}", "evil")
    assert is_archive(path)
    with pytest.raises(RunFolderError, match="not a name of a file in a run folder"):
        unpacked(path)


def test_a_newer_format_is_named(tmp_path: Path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("pulsetrain-archive.json", json.dumps({"format": 2, "run": "a", "id": "", "files": {}}))
    with pytest.raises(RunFolderError, match="format 2; this version reads 1; update"):
        unpacked(path)


def zipped(path: Path, files: dict[str, bytes], **contents: object) -> Path:
    """An archive as another version, or somebody else, may have made it."""
    listed = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    about = {"format": 1, "run": "a", "id": "", "files": listed, **contents}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("pulsetrain-archive.json", json.dumps(about))
        for name, data in files.items():
            file.writestr(f"a/{name}", data)
    return path


@pytest.mark.parametrize("words", [["watch", "--once"], ["events"], ["where"], ["diff", "a.run.zip"]], ids=" ".join)
def test_a_newer_log_in_an_archive_is_named(
    words: list[str], run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pulsetrain.engine.recording.log.writer.FORMAT", 3)
    newer = write_run(Path("newer"), [1.0] * 400)
    zipped(Path("a.run.zip"), content(newer))
    assert main([words[0], "a.run.zip", *words[1:]]) == 2
    said = capsys.readouterr().err
    assert "a.run.zip/events/events.jsonl.zst: has format 3, and this version reads up to 2" in said
    assert "pulsetrain-archive-" not in said


def attempt(path: Path) -> tuple[Path, str]:
    """The folder that the archive was unpacked into, and why it was not."""
    try:
        return unpacked(path), ""
    except RunFolderError as error:
        return path, str(error)


def harmed(path: Path, harm: str) -> None:
    data = bytearray(path.read_bytes())
    if harm == "encrypted":  # by the flags of every entry
        for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            at = data.find(mark)
            while at >= 0:
                data[at + offset] |= 1
                at = data.find(mark, at + 4)
    elif harm == "method":
        for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
            at = data.find(mark)
            while at >= 0:
                data[at + offset] = 97
                at = data.find(mark, at + 4)
    elif harm in ("lzma", "bzip2"):
        with zipfile.ZipFile(path) as whole:
            files = {name: whole.read(name) for name in whole.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA if harm == "lzma" else zipfile.ZIP_BZIP2) as file:
            for name, text in files.items():
                file.writestr(name, text)
            at = file.getinfo("a/run.json").header_offset + 50
        data = bytearray(path.read_bytes())
        data[at : at + 8] = b"\xff" * 8
    elif harm == "directory":
        at = data.find(b"PK\x01\x02")
        data[at : at + 4] = b"XXXX"
    else:
        del data[len(data) // 2 :]
    path.write_bytes(data)


@pytest.mark.parametrize("harm", ["encrypted", "method", "lzma", "bzip2", "directory", "truncated"])
def test_an_archive_that_cannot_be_read_is_named_and_hides_no_other_run(
    harm: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    harmed(zipped(Path("b.run.zip"), content(run)), harm)
    for words in (["report", "b.run.zip"], ["archive", "--unpack", "b.run.zip"]):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith("pulsetrain: error: b.run.zip: ")
    assert main(["runs", ".", "--columns", "run,status,reason"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["b.run.zip", "archived"], ["runs/a", "completed"]]


def test_any_flipped_byte_of_an_archive_is_an_error_that_names_it(run: Path, tmp_path: Path):
    whole = write_archive(run, tmp_path / "a.run.zip", checkpoints="none").path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 97)):
        path = tmp_path / "b.run.zip"
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        found, error = attempt(path)
        if error:
            assert error.startswith(f"{path}: ")
        else:  # a byte that says nothing, such as a date
            kept = {name: data for name, data in content(run).items() if not name.startswith("checkpoints/0")}
            assert content(found) == kept


def claimed(path: Path, size: int) -> Path:
    """An archive that says that its log has so many bytes."""
    about = {"format": 1, "run": "a", "id": "", "files": {"events/tail.jsonl": {"size": size, "sha256": "0"}}}
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("pulsetrain-archive.json", json.dumps(about))
    return path


def test_a_small_archive_of_a_huge_log_is_not_unpacked_to_list_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    claimed(Path("b.run.zip"), 500_000_000)
    monkeypatch.setattr("pulsetrain.runs.archive._extract", None)  # nothing is unpacked
    assert main(["runs", ".", "--columns", "run,reason"]) == 0
    listed = capsys.readouterr().out
    assert "is not listed: its log would have 500 MB, more than 100 times the archive; delete it if" in listed
    assert "runs/a" in listed


def test_a_log_that_would_fill_the_disk_is_not_unpacked_to_list_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = claimed(tmp_path / "b.run.zip", 60_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=100_000_000))
    monkeypatch.setattr("pulsetrain.runs.archive._extract", None)
    reason = summarize_archive(path).reason
    assert "is not listed: its log has 60 MB, more than half of the 100 MB that are free in " in reason
    assert "set TMPDIR to a folder with more space" in reason


def test_an_archive_that_would_fill_the_disk_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = claimed(tmp_path / "b.run.zip", 60_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=50_000_000))
    with pytest.raises(RunFolderError, match="it needs 60 MB, and 50 MB are free; choose another folder"):
        unpacked(path, tmp_path)
    assert os.listdir(tmp_path) == ["b.run.zip"]


def test_a_negative_size_in_an_archive_is_refused(tmp_path: Path):
    with pytest.raises(RunFolderError, match=r"list of files is damaged: Expected `int` >= 0"):
        unpacked(claimed(tmp_path / "b.run.zip", -1))


@pytest.mark.parametrize(
    "files", [{"x": b"1", "x/y": b"2"}, {"n" * 300: b"1"}, {"deep/" * 900 + "x": b"1"}], ids=["both", "long", "deep"]
)
def test_names_that_cannot_be_written_are_an_error_that_names_the_archive(
    files: dict[str, bytes], run: Path, capsys: pytest.CaptureFixture[str]
):
    zipped(Path("b.run.zip"), files)
    assert main(["events", "b.run.zip"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pulsetrain: error: b.run.zip: cannot be unpacked into ")
    assert "set TMPDIR" in said


def test_a_link_in_an_archive_becomes_a_file(run: Path):
    path = zipped(Path("b.run.zip"), {})
    listed = {"link": {"size": 11, "sha256": hashlib.sha256(b"/etc/passwd").hexdigest()}}
    with zipfile.ZipFile(path, "w") as file:
        about = {"format": 1, "run": "a", "id": "", "files": listed}
        file.writestr("pulsetrain-archive.json", json.dumps(about))
        info = zipfile.ZipInfo("a/link")
        info.external_attr = 0o120777 << 16
        file.writestr(info, "/etc/passwd")
    link = unpacked(path) / "link"
    assert not link.is_symlink()
    assert link.read_text() == "/etc/passwd"


def test_a_name_with_a_backslash_is_named(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "a\\b.txt").touch()
    assert main(["archive", "runs/a"]) == 2
    assert "an archive cannot hold a backslash in a name; rename it" in capsys.readouterr().err
    assert not Path("a.run.zip").exists()
    (run / "a\\b.txt").unlink()
    run.rename("a\\b")
    assert main(["archive", "a\\b"]) == 2
    assert "error: a\\b: an archive cannot hold a backslash in a name; rename it" in capsys.readouterr().err


def test_checkpoints_that_are_all_damaged_can_be_left_out(run: Path, capsys: pytest.CaptureFixture[str]):
    for each in (run / "checkpoints").glob("*/manifest.json"):
        each.write_bytes(b"{")
    said = "runs/a/checkpoints: every checkpoint there is damaged; archive the run with --checkpoints none\n"
    assert main(["archive", "runs/a", "--checkpoints", "latest"]) == 2
    assert capsys.readouterr().err.endswith(said)
    (run / "checkpoints" / "best").unlink()
    assert main(["archive", "runs/a"]) == 2
    assert capsys.readouterr().err.endswith(said)
    assert main(["archive", "runs/a", "--checkpoints", "none"]) == 0


def test_a_best_checkpoint_that_is_not_known_is_named(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "checkpoints" / "best").write_bytes(b"{")
    assert main(["archive", "runs/a"]) == 2
    said = "runs/a/checkpoints/best: is damaged, so the best checkpoint is not known; archive the run with "
    assert capsys.readouterr().err.endswith(f"{said}--checkpoints latest, all or none\n")
    assert main(["archive", "runs/a", "--checkpoints", "latest"]) == 0


def test_names_that_are_not_text_are_named(run: Path, capsys: pytest.CaptureFixture[str]):
    os.close(os.open(os.fsencode(run) + b"/caf\xe9.txt", os.O_CREAT | os.O_WRONLY))
    assert main(["archive", "runs/a"]) == 2
    said = capsys.readouterr().err
    assert "runs/a: the name of a file in it has bytes that are not text: " in said
    assert "rename it" in said
    assert not Path("a.run.zip").exists()


def test_a_run_whose_name_is_too_long_for_its_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / ("n" * 250), [1.0])
    assert main(["archive", str(tmp_path / ("n" * 250)), "--into", str(tmp_path)]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_hostile_texts_in_what_archive_prints_are_escaped(run: Path, capsys: pytest.CaptureFixture[str]):
    run.rename("runs/evil\x1b[2J")
    os.symlink("/etc", "runs/evil\x1b[2J/li\x1bnk")
    assert main(["archive", "runs/evil\x1b[2J"]) == 0
    found = capsys.readouterr()
    assert r"evil\x1b[2J.run.zip: " in found.out
    assert r"left out li\x1bnk: a link" in found.err
    assert "\x1b" not in found.out + found.err


def test_two_runs_of_one_name_do_not_become_one_archive(run: Path, capsys: pytest.CaptureFixture[str]):
    write_run(Path("more/a"), [1.0])
    assert main(["archive", "runs/a", "more/a", "--force"]) == 2
    assert "a.run.zip: two of the runs have this name" in capsys.readouterr().err
    assert not Path("a.run.zip").exists()


def test_unpacking_leaves_nothing_half(run: Path, capsys: pytest.CaptureFixture[str]):
    zipped(Path("b.run.zip"), {"x": b"1", "x/y": b"2"})
    Path("other").mkdir()
    assert main(["archive", "--unpack", "b.run.zip", "--into", "other"]) == 2
    assert "b.run.zip: cannot be unpacked into other: " in capsys.readouterr().err
    assert [each.name for each in Path("other").iterdir() if each.name[0] != "."] == []


@pytest.mark.parametrize(
    "words",
    [
        ["events", "RUN", "--check"],
        ["events", "RUN", "--event", "none"],
        ["diff", "RUN", "runs/b"],
        ["diff", "RUN", "runs/b", "--ranks"],
        ["replay", "RUN", "--handler", "early_stopping:patience=1,metric=val/loss"],
        ["replay", "RUN", "--handler", "early_stopping:patience=1,metric=no"],
        ["report", "RUN", "--into", "a\x1b.html"],
        ["export", "RUN", "--format", "csv"],
        ["verify", "RUN"],
        ["where", "RUN"],
        ["watch", "RUN", "--once"],
        ["fork", "RUN", "--at", "1", "--into", "b"],
        ["archive", "--unpack", "RUN"],
    ],
    ids=" ".join,
)
def test_a_hostile_name_of_an_archive_is_escaped(words: list[str], run: Path, capsys: pytest.CaptureFixture[str]):
    write_run(Path("runs/b"), [1.0, 0.25])
    run.rename("runs/evil\x1b[2J")
    hostile = "x\x1b]0;owned\x07\u202e.run.zip"
    write_archive(Path("runs/evil\x1b[2J"), Path(hostile))
    assert main([hostile if word == "RUN" else word for word in words]) in (0, 1, 2)
    said = capsys.readouterr()
    assert (said.out + said.err).replace("\n", "").isprintable()
    assert said.out + said.err
