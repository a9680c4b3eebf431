"""A log on a file system that other hosts share, or whose files cannot be mapped."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pulsetrain.engine import file_system
from pulsetrain.engine.file_system import FileSystem
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.log import tail
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.engine.recording.log.tail import PlainFile

T = 1_790_000_000_000_000_000


def fill(folder: Path, first: int, last: int) -> None:
    writer = LogWriter(folder)
    for n in range(first, last):
        writer.add(LoggedEvent(n, "trainer", "iteration_completed", 1, n, output={"loss": n * 0.5}, seq=n, t=T + n))
    writer.close()


@pytest.fixture
def said() -> Any:
    file_system.report_once.cache_clear()
    with capture_logs() as logs:
        yield logs
    file_system.report_once.cache_clear()


def refuse(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENODEV, "No such device")


@pytest.mark.parametrize("why", ["shared", "cannot be mapped"])
def test_a_log_without_a_mapped_file_has_the_same_bytes(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[Any]
):
    fill(tmp_path / "mapped", 0, 3000)
    if why == "shared":
        monkeypatch.setattr(tail, "file_system_of", lambda path: FileSystem("nfs4"))
        real = tail.mmap.mmap
        monkeypatch.setattr(
            tail.mmap, "mmap", lambda *given, **access: real(*given, **access) if access else pytest.fail("mapped")
        )
    else:
        monkeypatch.setattr(tail.mmap, "mmap", refuse)  # one module: reading is refused as well
    fill(tmp_path / "plain", 0, 1500)
    fill(tmp_path / "plain", 1500, 3000)  # another start of the run
    assert [len(list(EventLog(tmp_path / name).read())) for name in ("mapped", "plain")] == [3000, 3000]
    assert EventLog(tmp_path / "plain").verify() == []
    mapped, plain = ([each.read_bytes() for each in log_files(tmp_path / name)] for name in ("mapped", "plain"))
    assert len(mapped[0]) == len(plain[0])  # the blocks; the runs' ids differ
    events = [each for each in said if "plain writes" in each["event"]]
    assert len(events) == 1
    assert events[0]["file_system"] == ("nfs4" if why == "shared" else file_system.file_system_of(tmp_path).type)


def test_each_line_is_in_the_file_when_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[Any]):
    monkeypatch.setattr(tail, "file_system_of", lambda path: FileSystem("lustre"))
    opened = tail.Tail(tmp_path / "tail")
    opened.append(b'{"seq":1}')
    assert (tmp_path / "tail").read_bytes().startswith(b'{"seq":1,"c":')
    with (tmp_path / "tail").open("r+b") as file:
        plain = PlainFile(file.fileno(), tail.CHUNK)
        assert plain[:8] == b'{"seq":1'
        plain[2:5] = b"abc"
        assert (plain[:8], plain[tail.CHUNK - 2 :]) == (b'{"abc":1', b"\n\n")
        with pytest.raises(IndexError):
            plain[0:2] = b"abc"
    opened.close()
