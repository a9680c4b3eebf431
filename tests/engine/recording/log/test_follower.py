"""Following a log returns the events that reading all of it returns, however the files change in between."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.log import tail_follower
from pulsetrain.engine.recording.log.follower import LogFollower

T = 1_790_000_000_000_000_000


class Run:
    """Writes iterations, and follows them."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder
        self.writer = LogWriter(folder, **options)  # type: ignore[arg-type]
        self.seq = self.ord = 0
        self.log = LogFollower(folder)
        self.read: list[LoggedEvent] = []
        self.generation = 0

    def add(self, iteration: int, *, is_open: bool = False, is_observed: bool = False) -> LoggedEvent:
        event = LoggedEvent(
            ord=-1 if is_observed else self.ord,
            engine="trainer",
            event="checkpoint_saved" if is_observed else "iteration_completed",
            iteration=iteration,
            output={"loss": 1 / iteration},
            observed={"seconds": 0.5} if is_observed else None,
            open=is_open,
            seq=self.seq,
            t=T + self.seq,
        )
        self.writer.add(event)
        self.seq, self.ord = self.writer.last_seq + 1, self.ord + (not is_observed)
        return event

    def rewind(self, after: int, ord: int) -> None:
        self.writer.rewind(after, ord, self.seq, T + self.seq)
        self.seq, self.ord = self.writer.last_seq + 1, ord

    def end(self) -> None:
        self.writer.end()
        self.writer.close()

    def follow(self) -> list[LoggedEvent]:
        new = self.log.read()
        if self.log.generation != self.generation:
            self.generation, self.read = self.log.generation, []
        self.read += new
        return new

    def check(self) -> None:
        self.follow()
        self.read.sort(key=lambda event: event.seq)
        assert self.read == list(EventLog(self.folder).read())


@pytest.mark.parametrize("seed", range(4))
def test_it_returns_what_reading_everything_returns(seed: int, tmp_path: Path):
    draw = random.Random(seed)
    run = Run(tmp_path)
    opened: list[LoggedEvent] = []
    for iteration in range(1, 6001):
        opened += [run.add(iteration, is_open=True)] if draw.random() < 0.01 else []
        run.add(iteration, is_observed=draw.random() < 0.2)
        if opened and draw.random() < 0.005:
            for event in opened:
                run.writer.complete(event)
            opened = []
        if draw.random() < 0.003:
            run.follow()
    for event in opened:
        run.writer.complete(event)
    run.check()
    run.end()
    assert run.follow() == []
    run.check()
    assert run.log.ended
    assert (run.generation, run.log.damage) == (0, [])


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(tmp_path)
    for iteration in range(1, 900):
        run.add(iteration)
    assert len(run.follow()) == 899
    lines: list[bytes] = []
    monkeypatch.setattr(tail_follower, "unchecked", lambda line: lines.append(line) or unchecked(line))
    unchecked = sys.modules["pulsetrain.engine.recording.log.tail"].unchecked
    for iteration in range(900, 1000):
        run.add(iteration)
        assert [event.iteration for event in run.follow()] == [iteration]
        assert run.follow() == []
    assert len(lines) == 100


def test_an_event_is_returned_when_it_is_complete(tmp_path: Path):
    run = Run(tmp_path)
    event = run.add(1, is_open=True)
    run.add(2)
    assert [each.iteration for each in run.follow()] == [2]
    assert [each.iteration for each in run.log.unfinished] == [1]
    event.output = {"loss": 5.0}
    run.writer.complete(event)
    assert [(each.iteration, each.output) for each in run.follow()] == [(1, {"loss": 5.0})]
    assert run.log.unfinished == run.follow() == []


def test_what_a_killed_process_left_open_is_returned_once(tmp_path: Path):
    run = Run(tmp_path)
    run.add(1, is_open=True)
    assert run.follow() == []
    assert [each.iteration for each in run.log.finish()] == [1]
    assert run.follow() == run.log.finish() == []
    run.writer.close()
    run.writer = LogWriter(tmp_path)
    run.add(2)
    assert [each.iteration for each in run.follow()] == [2]


def test_a_resume_that_supersedes_events_begins_again(tmp_path: Path):
    run = Run(tmp_path)
    for iteration in range(1, 2001):
        run.add(iteration)
    run.follow()
    run.rewind(after=1499, ord=1500)
    for iteration in range(1501, 1601):
        run.add(iteration)
    run.check()
    assert run.generation == 1
    run.rewind(after=99, ord=100)
    run.check()
    assert run.generation == 2
    run.add(101)
    run.check()
    run.end()
    run.check()
    assert run.generation == 2


def test_a_resume_from_the_last_event_continues(tmp_path: Path):
    run = Run(tmp_path)
    run.add(1)
    run.follow()
    run.rewind(after=0, ord=1)
    run.add(2)
    run.check()
    assert run.generation == 0


def test_a_thinned_log_is_followed_on(tmp_path: Path):
    run = Run(tmp_path, max_bytes=60_000)
    for iteration in range(1, 12_001):
        run.add(iteration)
        if iteration % 700 == 0:
            run.follow()
    run.follow()
    assert run.generation == 0
    assert [event.iteration for event in run.read if event.event == "iteration_completed"] == list(range(1, 12_001))
    assert any(event.event == "log_thinned" for event in run.read)


def test_another_run_in_the_folder_begins_again(tmp_path: Path):
    run = Run(tmp_path / "run")
    for iteration in range(1, 1500):
        run.add(iteration)
    run.follow()
    run.writer.close()
    shutil.rmtree(tmp_path / "run")
    assert run.follow() == []
    again = Run(tmp_path / "run")
    again.add(7)
    assert [event.iteration for event in run.follow()] == [7]
    assert run.generation == 1


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path: Path):
    log = LogFollower(tmp_path / "run" / "events")
    assert log.read() == []
    assert not log.exists
    writer = LogWriter(tmp_path / "run" / "events")
    assert log.read() == []
    writer.add(LoggedEvent(ord=0, event="started", seq=0, t=T))
    assert len(log.read()) == 1


def test_a_damaged_block_and_a_damaged_line_are_left_out(tmp_path: Path):
    run = Run(tmp_path)
    for iteration in range(1, 3001):
        run.add(iteration)
    sealed, tail = run.writer.files
    content = bytearray(sealed.read_bytes())
    content[len(content) // 4] ^= 1
    sealed.write_bytes(content)
    content = tail.read_bytes()
    at = content.index(b'"iteration":2900')
    tail.write_bytes(content[:at] + b"x" + content[at + 1 :])
    run.follow()
    run.follow()
    assert [event.iteration for event in run.read] == [n for n in range(1, 3001) if n > 1024 and n != 2900]
    (damage,) = run.log.damage
    assert "1024 events, seq 0 to 1023" in str(damage)


def test_a_newer_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pulsetrain.engine.recording.log.writer.FORMAT", 3)
    run = Run(tmp_path)
    for iteration in range(1, 2000):
        run.add(iteration)
    with pytest.raises(RecordingError, match="has format 3, and this version reads up to 2"):
        run.follow()


def test_a_time_limit_returns_a_part(tmp_path: Path):
    run = Run(tmp_path)
    for iteration in range(1, 5001):
        run.add(iteration)
    first = run.log.read(0.0)
    assert 0 < len(first) < 5000
    assert 0 < run.log.share < 1
    found = [*first]
    while run.log.share < 1:
        found += run.log.read(0.0)
    assert [event.iteration for event in found] == list(range(1, 5001))


def test_the_newest_blocks_alone(tmp_path: Path):
    run = Run(tmp_path)
    for iteration in range(1, 5001):
        run.add(iteration)
    found = LogFollower(tmp_path, recent=1).read()
    assert [event.iteration for event in found] == list(range(3 * 1024 + 1, 5001))


WRITER = """
import sys, time
from pathlib import Path
from pulsetrain.engine.recording import LoggedEvent, LogWriter
writer = LogWriter(Path(sys.argv[1]))
for n in range(40_000):
    event = LoggedEvent(ord=n, engine="trainer", event="iteration_completed", iteration=n, seq=n, t=time.time_ns())
    event.open = n % 7 == 0
    writer.add(event)
    if event.open:
        writer.complete(event)
writer.end()
writer.close()
"""


def test_a_log_is_followed_while_another_process_writes_it(tmp_path: Path):
    log, found = LogFollower(tmp_path), []
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) as process:
        until = time.monotonic() + 60
        while not log.ended and time.monotonic() < until:
            found += log.read()
    assert process.returncode == 0
    assert (log.generation, log.damage) == (0, [])
    assert [event.iteration for event in found if event.iteration % 7] == [n for n in range(40_000) if n % 7]
    assert sorted(event.iteration for event in found) == list(range(40_000))
