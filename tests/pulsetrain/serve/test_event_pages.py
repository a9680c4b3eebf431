"""Pages of events: from either end, of each rank, and what was written since."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.log.backwards import read_backwards
from pulsetrain.serve import event_pages
from pulsetrain.serve.event_pages import events_of
from tests.support.run_folders import write_run


def add(writer: LogWriter, first: int, last: int) -> None:
    for seq in range(first, last + 1):
        name = "started" if not seq else "iteration_completed"
        writer.add(LoggedEvent(seq, "trainer", name, 1, seq, seq=seq, t=seq))


def seqs(found: dict[str, object]) -> list[int]:
    return [event["seq"] for event in found["events"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("closed", [True, False])
def test_a_log_is_read_from_its_end(tmp_path: Path, closed: bool):
    writer = LogWriter(tmp_path / "a" / "events")
    add(writer, 0, 5000)
    if closed:
        writer.close()
    log = EventLog(tmp_path / "a")
    assert len(log.headers) > 1
    blocks = list(read_backwards(log))
    assert [event.seq for block in reversed(blocks) for event in block] == list(range(5001))
    part = [event.seq for block in reversed(list(read_backwards(log, 4000))) for event in block]
    assert part == list(range(4000))
    assert [event.seq for block in read_backwards(log, 9, event="started") for event in block] == [0]


def test_pages_follow_each_other_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_pages, "_SHOWN", 4)
    writer = LogWriter(tmp_path / "a" / "events")
    add(writer, 0, 9)
    log = EventLog(tmp_path / "a")
    newest = events_of(log, newest=True)
    assert (seqs(newest), newest["next"], newest["end"]) == ([9, 8, 7, 6], 6, 10)
    assert seqs(events_of(log, newest=True, before=6)) == [5, 4, 3, 2]
    rest = events_of(log, newest=True, before=2)
    assert (seqs(rest), rest["next"]) == ([1, 0], None)
    assert (seqs(first := events_of(log)), first["next"]) == ([0, 1, 2, 3], 4)
    assert seqs(events_of(log, newest=True, types=["started"])) == [0]
    add(writer, 10, 11)
    since = events_of(EventLog(tmp_path / "a"), after=newest["end"])
    assert (seqs(since), since["next"], since["end"]) == ([10, 11], None, 12)
    writer.add(LoggedEvent(12, "trainer", "iteration_completed", 1, 12, seq=12, t=12, open=True))
    opened = events_of(EventLog(tmp_path / "a"), after=12)
    assert (seqs(opened), opened["end"]) == ([12], 12)  # it is read again once it is complete


def test_the_ranks_are_listed_and_a_condition_may_fail_on_new_events(tmp_path: Path):
    folder = write_run(tmp_path / "a", [1.0])
    add(LogWriter(folder / "events", 3), 0, 2)
    log = EventLog(folder)
    assert events_of(log)["ranks"] == [0, 3]
    found = events_of(log, where='payload["metrics"]["val/loss"] > 0', after=log.last().seq)  # type: ignore[union-attr]
    assert found["events"] == []
