"""The log's writer on a full disk, with a small budget, and in forked processes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from pulsetrain.engine import Engine, Events
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter, Replay, read_ranks
from pulsetrain.engine.recording.log.blocks import parse
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.engine.recording.log.tail import Tail
from pulsetrain.handlers import EventRecorder

T = 1_790_000_000_000_000_000


def event(n: int, kind: str = "iteration_completed", **fields: Any) -> LoggedEvent:
    return LoggedEvent(n, "trainer", kind, 1, n, output={"loss": n * 0.37 % 7}, seq=n, t=T + n, **fields)


def written(folder: Path, events: int, **options: Any) -> LogWriter:
    writer = LogWriter(folder, **options)
    for n in range(events):
        writer.add(event(n))
    return writer


def end(writer: LogWriter) -> None:
    writer.end()
    writer.close()


@pytest.mark.parametrize("place", [0, 3, 8])
def test_a_line_that_has_vanished_from_the_tail_is_damage_before_and_after_the_log_continues(
    place: int, tmp_path: Path
):
    written(tmp_path, 10).close()
    tail = log_files(tmp_path)[1]
    _, *lines = filter(None, tail.read_bytes().split(b"\n"))  # the first is the head
    tail.write_bytes(tail.read_bytes().replace(lines[place], b"\n" * len(lines[place])))
    assert EventLog(tmp_path).verify()
    writer = LogWriter(tmp_path)
    writer.add(event(10))
    end(writer)
    assert EventLog(tmp_path).verify()


def test_a_block_that_skips_numbers_is_damage(tmp_path: Path):
    writer = LogWriter(tmp_path)
    for n in (0, 1, 2, 5, 6):
        writer.add(event(n))
    end(writer)
    (found,) = EventLog(tmp_path).verify()
    assert "ord 3 to 4: after iteration 2" in str(found)


def test_a_forked_process_does_not_hold_the_log(tmp_path: Path):
    writer = written(tmp_path, 3)
    ready, go = os.pipe()
    child = os.fork()
    if not child:
        os.read(ready, 1)  # as a loader's worker, which outlives the run
        os._exit(0)
    try:
        end(writer)
        end(LogWriter(tmp_path))  # the same process again
    finally:
        os.write(go, b"x")
        os.waitpid(child, 0)


def test_another_writer_is_still_refused_after_a_fork(tmp_path: Path):
    writer = written(tmp_path, 3)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(RunFolderError, match="another recorder is writing it"):
        LogWriter(tmp_path)
    end(writer)


def test_no_event_is_lost_where_a_block_cannot_be_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer, write = written(tmp_path, 1000), os.pwrite

    def full(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for n in range(1000, 1100):
        monkeypatch.setattr(os, "pwrite", full if n == 1024 else write)
        if n == 1024:
            with pytest.raises(OSError, match="No space"):
                writer.add(event(n))
        else:
            writer.add(event(n))
    monkeypatch.setattr(os, "pwrite", write)
    assert [each.ord for each in EventLog(tmp_path).read()] == list(range(1100))
    end(writer)
    log = EventLog(tmp_path)
    assert [each.ord for each in log.read()] == list(range(1100))
    assert (log.damage, log.ended) == ([], True)


def rewind(writer: LogWriter) -> None:
    writer.rewind(after=39, ord=40, seq=100, t=T)


def lose(writer: LogWriter) -> None:
    writer.lose(seq=150, ord=140, reason="the log is old", t=T)


def restore_seams(writer: LogWriter) -> None:
    writer.restore_seams([(120, 59, 60), (130, 39, 40)], T)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(
    ("note", "ord", "left"),
    [(rewind, 40, range(40)), (restore_seams, 40, range(40)), (lose, 140, range(100))],
    ids=["rewind", "restore_seams", "lose"],
)
def test_a_resume_on_a_full_disk_keeps_its_place_in_the_log(
    note: Any, ord: int, left: range, killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    writer, write, append = written(tmp_path, 100), os.pwrite, Tail.append
    writer.next_ord = 100

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    if note is not rewind:  # which seals first; the tail has room
        monkeypatch.setattr(Tail, "append", full)
    with pytest.raises(OSError, match="No space"):
        note(writer)
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(Tail, "append", append)
    assert writer.next_ord == ord
    if killed and note is rewind:
        writer.close()
        writer = LogWriter(tmp_path)
        assert writer.next_ord == ord
    for n in range(ord, ord + 20):
        writer.add(LoggedEvent(n, "trainer", "iteration_completed", 1, n, seq=200 + n, t=T + n))
    end(writer)
    log = EventLog(tmp_path)
    assert [each.ord for each in log.read() if each.ord >= 0] == [*left, *range(ord, ord + 20)]
    assert len(log.verify()) == (note is lose), "what was lost, and nothing else"


@pytest.mark.parametrize("resumed", [False, True])
def test_a_disk_that_stays_full_costs_the_oldest_events_and_says_so(
    resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    writer, write, append = written(tmp_path, 100), os.pwrite, Tail.append
    writer.seal()
    monkeypatch.setattr("pulsetrain.engine.recording.log.writer._KEPT_IN_MEMORY", 3000)

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(Tail, "append", full)
    first = 40 if resumed else 100
    if resumed:
        with pytest.raises(OSError, match="No space"):
            rewind(writer)
    for n in range(first, 20_000):
        with pytest.raises(OSError, match="No space"):
            writer.add(LoggedEvent(n, "trainer", "iteration_completed", 1, n, seq=200 + n, t=T + n))
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(Tail, "append", append)
    end(writer)
    log = EventLog(tmp_path)
    found = [each.ord for each in log.read() if each.ord >= 0]
    left = [ord for ord in found if ord >= first]
    assert found == [*range(first), *range(left[0], 20_000)], "of a resumed run, nothing that it has computed again"
    assert 1000 < len(left) <= 3000
    (lost,) = [each for each in log.read() if each.event == "log_lost"]
    assert lost.payload["events"] == 20_000 - first - len(left)
    assert [str(lost.payload["events"]) in str(each) for each in log.verify()] == [True]


@pytest.mark.parametrize("before", [1023, 1024, 1025, 2047])
def test_the_record_of_a_resume_and_that_of_lost_events_have_numbers_of_their_own(
    before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pulsetrain.engine.recording.log.writer._KEPT_IN_MEMORY", 3000)
    writer, write, append = LogWriter(tmp_path), os.pwrite, Tail.append

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(Tail, "append", full)
    for n in range(before):
        with pytest.raises(OSError, match="No space"):
            writer.add(event(n))
    with pytest.raises(OSError, match="No space"):
        writer.rewind(after=39, ord=40, seq=before, t=T)
    for n in range(2500):
        with pytest.raises(OSError, match="No space"):
            writer.add(LoggedEvent(40 + n, "trainer", "epoch_started", 1, n, seq=before + 1 + n, t=T))
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(Tail, "append", append)
    end(writer)
    numbers = [each.seq for each in EventLog(tmp_path).read(superseded=True)]
    assert len(set(numbers)) == len(numbers) > 1000
    assert {"log_resumed", "log_lost"} <= {each.event for each in EventLog(tmp_path).read(superseded=True)}


@pytest.mark.slow
@pytest.mark.parametrize("budget", [100_000, 300_000])
def test_a_budget_holds_however_long_the_run_is(budget: int, tmp_path: Path):
    writer = written(tmp_path, 150_000, max_bytes=budget)
    assert writer.nbytes < 1.2 * budget
    end(writer)
    log = EventLog(tmp_path)
    assert (log.verify(), log.ended) == ([], True)
    found = list(log.read())
    assert len({each.seq for each in found}) == len(found)
    said = [each for each in found if each.event == "log_thinned"]
    assert sum(each.payload["events"] for each in said) == 150_000 - (len(found) - len(said))
    iterations = [each.iteration for each in found if each.event == "iteration_completed"]
    assert set(range(0, 150_000, 100)) <= set(iterations)  # each hundredth is kept
    assert set(range(149_000, 150_000)) <= set(iterations)  # and the newest


def test_events_that_were_thinned_out_are_not_reported_as_missing(tmp_path: Path):
    for attempt in range(6):
        writer = LogWriter(tmp_path, max_bytes=1)
        for n in range(3 * attempt, 3 * attempt + 3 * (attempt % 2)):  # none in every second one
            writer.add(event(n))
        end(writer)
    log = EventLog(tmp_path)
    assert sum(header.thinned for header in log.headers) > 0
    assert log.verify() == []


def test_thinning_copies_damaged_blocks_unchanged(tmp_path: Path):
    end(written(tmp_path, 6 * 1024))
    sealed, _ = log_files(tmp_path)
    content = bytearray(sealed.read_bytes())
    block = parse(content, 0)
    assert block is not None
    content[block.frame + 100] ^= 1
    sealed.write_bytes(content)
    writer = LogWriter(tmp_path, max_bytes=len(content) // 2)
    for n in range(6 * 1024, 9 * 1024):
        writer.add(event(n))
    end(writer)
    log = EventLog(tmp_path)
    (damage,) = log.verify()
    assert "1024 events, seq 0 to 1023" in damage.reason
    assert {each.iteration for each in log.read()} > {1100, 1200, 9 * 1024 - 1}


def test_a_table_whose_blocks_lie_elsewhere_is_not_believed(tmp_path: Path):
    end(written(tmp_path, 20 * 1024))
    sealed, _ = log_files(tmp_path)
    content = sealed.read_bytes()
    first = parse(content, 0)
    assert first is not None
    second = parse(content, first.end)
    assert second is not None
    sealed.write_bytes(content[: second.start] + content[second.end :])
    log = EventLog(tmp_path)
    assert [each.ord for each in log.read()] == [*range(1024), *range(2048, 20 * 1024)]
    assert any("missing" in damage.reason for damage in log.damage)


def test_events_missing_before_the_tail_are_reported(tmp_path: Path):
    writer = written(tmp_path, 2100)
    sealed, _ = log_files(tmp_path)
    content = sealed.read_bytes()
    block = parse(content, 0)
    assert block is not None
    sealed.write_bytes(content[: block.end])  # the second block is missing, the tail is complete
    (damage,) = EventLog(tmp_path).damage
    assert "after seq 1023 are missing, up to seq 2047" in damage.reason
    writer.close()


def test_reading_twice_gives_the_same(tmp_path: Path):
    writer = LogWriter(tmp_path)
    writer.add(event(0, payload={"metrics": {}}, observed={"seconds": 2.0}))
    log = EventLog(tmp_path)
    first = list(log.read())
    assert first == list(log.read())
    assert first[0].payload == {"metrics": {}, "seconds": 2.0}
    assert log.tail[0].payload == {"metrics": {}}
    end(writer)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "ä", ""])
def test_events_of_any_name_are_replayed(name: str, tmp_path: Path):
    writer = LogWriter(tmp_path)
    for n in range(2000):
        writer.add(event(n, name if n % 10 == 0 else "iteration_completed"))
    end(writer)
    replay, heard = Replay(tmp_path), []
    replay.add_event_handler(name, lambda: heard.append(1))
    replay.run()
    assert len(heard) == 200


def test_going_back_takes_the_metrics_back(tmp_path: Path):
    trainer = Engine(lambda engine, batch: 0.5, name="trainer")
    EventRecorder(tmp_path).attach(trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(accuracy=0.5))
    trainer.run([1, 2], max_epochs=1)
    replay = Replay(tmp_path)
    replay.run()
    assert replay.state.metrics == {"accuracy": 0.5}
    replay.seek(0)
    assert replay.state.metrics == {}
    replay.add_event_handler(Events.STARTED, lambda: replay.seek(0))
    with pytest.raises(RuntimeError, match=r"seek\(\) was called from inside"):
        replay.run()


def test_ranks_are_read_without_the_first_one_and_over_two_runs(tmp_path: Path):
    for rank in (1, 2):
        writer = LogWriter(tmp_path, rank)
        for n, iteration in enumerate((1, 2, 3, 1, 2)):  # a second run in the folder
            writer.add(LoggedEvent(n, "trainer", "iteration_completed", 1, iteration, seq=n, t=T + n))
        end(writer)
    found = [(rank, each.ord) for rank, each in read_ranks(tmp_path)]
    assert found == [(rank, n) for n in range(5) for rank in (1, 2)]


def test_a_closed_log_refuses_events_and_touches_no_file_that_got_its_descriptor(tmp_path):
    writer = LogWriter(tmp_path / "run")
    writer.add(LoggedEvent(0, "engine", "started", 0, 0, None, seq=1, t=1))
    writer.end()
    writer.close()
    victim = tmp_path / "victim.csv"
    victim.write_text("epoch,loss\n1,0.5\n")
    reusing = [victim.open("r+") for _ in range(3)]
    with pytest.raises(ValueError, match="the event log is closed"):
        writer.add(LoggedEvent(1, "engine", "completed", 0, 0, None, seq=2, t=1))
    assert victim.read_text() == "epoch,loss\n1,0.5\n"
    for file in reusing:
        file.close()
