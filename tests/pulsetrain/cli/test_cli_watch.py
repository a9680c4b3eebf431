"""`pulsetrain watch`, as text and in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from itertools import cycle
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.recording import EventLog
from tests.pulsetrain.runs.test_live import Writing
from tests.pulsetrain.runs.test_summary import own
from tests.support.run_folders import write_run


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # else as many as the terminal of the tests has


def printed(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["watch", *words]) == status
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_once_prints_the_state_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = Writing(tmp_path / "run")
    own(tmp_path / "run", os.getpid())
    log.add("started", payload={"total_iterations": 1000, "max_epochs": 2})
    log.train(1, 250)
    log.add("anomaly_detected", 250, payload={"kind": "loss_spike", "value": 7.5, "batch_indices": []})
    found = printed(capsys, str(tmp_path / "run"), "--once")
    first = found.splitlines()[0]
    assert re.search(r"^run  (running|stalled).*25%  epoch 1/2  iteration 250/1,000", first)
    for text in ("80 samples/s", "val/loss  1.005", "     200  200, 0.0 MB", "     250  loss_spike: 7.5"):
        assert text in found
    assert "newest 12 events:" in found
    assert "\x1b" not in found


@pytest.mark.parametrize("columns", [40, 100])
def test_once_fits_into_the_columns(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    write_run(tmp_path / "run", [1.0, 0.5, 0.25])
    monkeypatch.setenv("COLUMNS", str(columns))
    found = printed(capsys, str(tmp_path / "run"), "--once").splitlines()
    assert "epoch 3/4" in found[0]  # the progress is whole, however narrow the terminal is
    assert max(map(len, found[1:])) <= columns
    assert any(len(line) > columns - 5 for line in found if "│" in line)
    monkeypatch.delenv("COLUMNS")
    whole = printed(capsys, str(tmp_path / "run"), "--once")
    assert "…" not in whole


def test_once_needs_no_textual(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "textual", None)
    write_run(tmp_path / "a", [1.0, 0.5])
    write_run(tmp_path / "b", [2.0], "exception_raised", reason="bad")
    found = printed(capsys, str(tmp_path / "a"), str(tmp_path / "b"), "--once", "--where", "epoch == 1")
    assert "a  completed" in found
    assert "b  failed: ValueError: bad" in found
    assert "newest 6 matching events:" in found


def test_without_textual_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "textual", None)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    write_run(tmp_path / "a", [1.0])
    assert "pip install 'pulsetrain[watch]'" in printed(capsys, str(tmp_path / "a"), status=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none", "--once"], "none: does not exist; name a run folder"),
        (["notes", "--once"], "notes: is not a run folder; one has run.json or events"),
        (["notes"], "notes: is not a run folder"),
        (["run"], "is not a terminal; add --once"),
        (["run", "--once", "--where", "evnt == 1"], "no field 'evnt'; did you mean 'event'?"),
    ],
)
def test_wrong_input_is_explained(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    write_run(tmp_path / "run", [1.0])
    assert message in printed(capsys, *words, status=2)


def test_a_damaged_log_is_printed_as_far_as_it_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = Writing(tmp_path / "run")
    log.train(1, 1500)
    sealed, _ = log.writer.files
    content = bytearray(sealed.read_bytes())
    content[len(content) // 2] ^= 1
    sealed.write_bytes(content)
    found = printed(capsys, str(tmp_path / "run"), "--once", status=3)
    assert f"damaged log: {EventLog(tmp_path / 'run').damage[0]}" in found
    assert "iteration 1,500" in found


def test_a_log_of_which_nothing_can_be_read_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run", [1.0, 0.5])
    (run / "events" / "events.jsonl.zst").write_bytes(b"damaged" * 1000)
    (run / "events" / "tail.jsonl").write_bytes(b"damaged" * 1000)
    found = printed(capsys, str(run), "--once", status=3)
    assert "none of its events can be read" in found
    assert "waiting" not in found


def test_a_hostile_run_name_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_run(tmp_path / "[red]\x1b[31mrun", [1.0], "exception_raised", reason="\x1b]0;owned\x07")
    found = printed(capsys, str(folder), "--once")
    assert r"[red]\x1b[31mrun  failed: ValueError: \x1b]0;owned\x07" in found
    assert "\x1b" not in found


class Terminal:
    """A pseudo-terminal with the command in it."""

    def __init__(self, *words: str) -> None:
        self._file, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment = {**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pulsetrain", "watch", *words]
        self.process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
        os.close(child)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 30.0) -> float:
        """Read until the text comes; returns the seconds that it took."""
        begun = time.monotonic()
        while text not in self.seen:
            left = begun + seconds - time.monotonic()
            assert left > 0, f"{text!r} did not come: {self.seen[-3000:]!r}"
            if select.select([self._file], [], [], left)[0]:
                try:
                    self.seen += os.read(self._file, 1 << 16).decode(errors="replace")
                except OSError:  # the command has ended
                    assert text in self.seen, self.seen[-3000:]
        return time.monotonic() - begun

    def press(self, keys: str) -> None:
        self.seen = ""
        os.write(self._file, keys.encode())

    def quit(self, seconds: float = 30.0) -> int:
        """Press escape and q until the command ends: the first keys may come before the field of the condition does."""
        until, keys = time.monotonic() + seconds, cycle("\x1bq")
        while self.process.poll() is None and time.monotonic() < until:
            self.press(next(keys))
            begun = time.monotonic()
            while self.process.poll() is None and time.monotonic() < begun + 0.4:
                if select.select([self._file], [], [], 0.1)[0]:
                    with contextlib.suppress(OSError):  # it has ended
                        os.read(self._file, 1 << 16)  # otherwise it would wait
        return self.process.wait(0)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._file)


def test_in_a_terminal_an_event_is_shown_within_a_second_and_keys_work(tmp_path: Path):
    log = Writing(tmp_path / "run")
    own(tmp_path / "run", os.getpid())
    log.add("started", payload={"total_iterations": 1000, "max_epochs": 2})
    log.train(1, 250)
    terminal = Terminal(str(tmp_path / "run"))
    try:
        terminal.wait_for("200, 0.0 MB")
        delays = []
        for n in range(5):
            terminal.seen = ""
            log.add("anomaly_detected", 250, payload={"kind": f"kind_{n}", "value": 7.5, "batch_indices": []})
            delays.append(terminal.wait_for(f"kind_{n}"))
        assert min(delays) < 1.0, delays
        terminal.press(" ")
        terminal.wait_for("paused")
        terminal.press(" ")
        terminal.press("/")
        terminal.wait_for("a condition, such as")
        assert terminal.quit() == 0
    finally:
        terminal.close()
