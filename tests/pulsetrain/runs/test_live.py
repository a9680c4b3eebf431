"""A run that is followed while it is trained shows what a full read of its log shows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pulsetrain.engine.errors import RecordingError, RunFolderError
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.log.predicate import predicate
from pulsetrain.report.curve import POINTS
from pulsetrain.report.record import RunRecord
from pulsetrain.runs.live import LiveRun
from pulsetrain.runs.summary import Status, summarize
from tests.pulsetrain.runs.test_summary import own
from tests.support.run_folders import write_run

T = 1_790_000_000_000_000_000


class Writing:
    """Writes the log of a rank, one event in 10 ms."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.writer = LogWriter(folder / "events", rank)
        self.seq = self.ord = 0

    def add(self, event: str, iteration: int = 0, engine: str = "trainer", **fields: object) -> LoggedEvent:
        is_observed = event in ("started", "completed", "checkpoint_saved", "exception_raised")
        made = LoggedEvent(
            ord=-1 if is_observed else self.ord,
            engine=engine,
            event=event,
            epoch=1 + max(iteration - 1, 0) // 500,
            iteration=iteration,
            seq=self.seq,
            t=T + self.seq * 10**7,
            **fields,
        )
        self.writer.add(made)
        self.seq, self.ord = self.seq + 1, self.ord + (not is_observed)
        return made

    def train(self, first: int, last: int, base: float = 1.0) -> None:
        for iteration in range(first, last + 1):
            self.add("iteration_started", iteration)
            loss = 9.0 if iteration == 777 else base / iteration
            self.add("iteration_completed", iteration, output={"loss": loss}, lr=[0.1])
            if iteration % 100 == 0:
                observed = {"metrics": {"samples_per_second": 80.0}}
                self.add("metrics_logged", iteration, payload={"metrics": {"train/loss": loss}}, observed=observed)
                metrics = {"val/loss": base + 1 / iteration}
                self.add("validation_completed", iteration, payload={"metrics": metrics})
                saved = {"path": f"checkpoints/{iteration}", "iteration": iteration, "bytes": 10}
                self.add("checkpoint_saved", iteration, payload=saved)


def check_same(run: LiveRun) -> None:
    """Its curves, marks and newest events are those that a full read finds."""
    log = EventLog(run.folder)
    record = RunRecord(log)
    assert [*run.curves] == [*record.curves]
    for name, curve in run.curves.items():
        assert curve.last == record.curves[name].last
        assert [each.tolist() for each in curve.points()] == [each.tolist() for each in record.curves[name].points()]
    assert run.main is not None
    for row, marks in record.marks.items():
        assert [(mark.iteration, str(mark)) for _, mark in run.marks(row)] == [(m.iteration, str(m)) for m in marks]
    newest = sorted((each.event for each in run.newest), key=lambda event: event.seq)
    assert newest == list(log.read())[-len(newest) :]
    # of the events that a report reads: a killed run may have begun an iteration
    assert (run.main.curves.iteration, run.main.curves.epoch) == (record.iteration, record.epoch)
    assert run.damage == record.damage


def test_every_reading_shows_what_a_full_read_shows(tmp_path: Path):
    log, run = Writing(tmp_path), LiveRun(tmp_path)
    assert (run.update(), run.is_there, run.status) == (False, True, None)
    log.add("started", payload={"total_iterations": 4000, "max_epochs": 8})
    for first in range(1, 3001, 250):
        log.train(first, first + 249)
        assert run.update()
        assert not run.update()
        check_same(run)
    assert run.progress.share == 0.75
    log.add("completed", 3000)
    log.writer.end()
    run.update()
    check_same(run)
    assert (run.status, run.reason) == (Status.COMPLETED, "")


def test_a_rewind_that_supersedes_events_is_followed(tmp_path: Path):
    log, run = Writing(tmp_path), LiveRun(tmp_path)
    log.train(1, 2000)
    run.update()
    before = next(e for e in EventLog(tmp_path).read() if e.event == "validation_completed" and e.iteration == 1500)
    log.writer.rewind(before.seq, before.ord + 1, log.seq, T)
    log.seq, log.ord = log.seq + 1, before.ord + 1
    log.train(1501, 1600, base=5.0)
    run.update()
    check_same(run)
    assert run.curves["val/loss"].last == (1600, 5.0 + 1 / 1600)
    log.train(1601, 4000, base=5.0)
    run.update()
    check_same(run)


def test_a_long_curve_keeps_its_spike_in_bounded_memory(tmp_path: Path):
    log, run = Writing(tmp_path), LiveRun(tmp_path)
    for first in range(1, 12_001, 400):
        log.train(first, first + 399)
        run.update()
        run.curves["loss, each iteration"].points()
    at, values = run.curves["loss, each iteration"].points()
    assert (777.0, 9.0) in list(zip(at.tolist(), values.tolist(), strict=True))
    assert len(at) <= POINTS + 2
    assert len(run.newest) == 2000
    check_same(run)


def test_a_time_limit_reads_the_log_in_parts(tmp_path: Path):
    log = Writing(tmp_path)
    log.train(1, 8000)
    run = LiveRun(tmp_path)
    run.update(0.0)
    shares = [run.share_read]
    while run.share_read < 1.0:
        run.update(0.0)
        shares.append(run.share_read)
    assert shares == sorted(shares)
    assert run.progress.iteration == 8000
    check_same(run)


def test_progress_and_time_left(tmp_path: Path):
    log, run = Writing(tmp_path), LiveRun(tmp_path, clock=lambda: T / 1e9 + 10)
    own(tmp_path, os.getpid())
    log.add("started", payload={"total_iterations": 400, "max_epochs": 8, "epoch_length": 50})
    log.train(1, 99)
    run.update()
    found = run.progress
    assert (found.iteration, found.total_iterations, found.share) == (99, 400, 99 / 400)
    assert run.seconds_left == pytest.approx(301 * 0.02, rel=0.02)
    assert run.status is Status.RUNNING
    assert run.main is not None
    assert run.main.iterations_per_second == pytest.approx(50.0)
    assert run.main.step_seconds == pytest.approx(0.01)
    log.add("completed", 99)
    run.update()
    assert (run.status, run.seconds_left) == (Status.COMPLETED, None)


def test_the_status_is_that_of_a_summary(tmp_path: Path):
    for name, end in {"a": "completed", "b": "terminate", "c": "exception_raised", "d": None}.items():
        folder = write_run(tmp_path / name, [1.0, 0.5], end, reason="because")
        run, found = LiveRun(folder), summarize(folder)
        run.update()
        assert (run.status, run.reason) == (found.status, found.reason)
        assert run.progress == found.reached


def test_open_events_of_a_killed_run_count(tmp_path: Path):
    log, run = Writing(tmp_path), LiveRun(tmp_path)
    own(tmp_path, os.getpid())
    log.train(1, 3)
    log.add("epoch_completed", 3, metrics={"x": 1.0}, open=True)
    run.update()
    assert [each.event.event for each in run.newest][-1] == "iteration_completed"
    assert run.main is not None
    assert run.main.last is not None
    assert run.main.last.event == "epoch_completed"
    own(tmp_path, 2**22 + 1)  # no process has this number
    run.update()
    assert run.status is Status.KILLED
    assert [each.event.event for each in run.newest][-1] == "epoch_completed"
    check_same(run)
    assert not run.update()


def test_a_run_that_ends_while_it_is_looked_at_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log, run, judge = Writing(tmp_path), LiveRun(tmp_path), LiveRun._judge
    own(tmp_path, os.getpid())
    log.train(1, 3)
    last = log.add("completed", 3, open=True)

    def end_before(looking: LiveRun) -> None:
        """Its last event was read as an open one; now it is completed, and the process ends."""
        monkeypatch.setattr(LiveRun, "_judge", judge)
        log.writer.complete(last)
        log.writer.end()
        log.writer.close()
        own(tmp_path, 2**22 + 1)  # no process has this number
        judge(looking)

    monkeypatch.setattr(LiveRun, "_judge", end_before)
    run.update()
    assert run.status is Status.COMPLETED
    check_same(run)


def test_open_events_of_a_resumed_run_stay_open_while_its_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    main, other, run = Writing(tmp_path), Writing(tmp_path, 1), LiveRun(tmp_path)
    own(tmp_path, 2**22 + 1)  # no process has this number
    for each in (main, other):
        each.train(1, 3)
    run.update()
    assert run.status is Status.KILLED
    own(tmp_path, os.getpid())
    main.train(4, 9_000)
    begun = other.add("iteration_started", 4, open=True)
    monkeypatch.setattr("pulsetrain.runs.live._PART", 1e-6)
    run.update(0.0)
    assert run.share_read < 1
    while run.share_read < 1:
        run.update(0.0)
    other.writer.complete(begun)
    run.update()
    assert run.status is Status.STALLED  # its process is there, and the times of its events are long ago
    assert run.ranks[1].last == [*EventLog(tmp_path, 1).read()][-1]
    assert not run.ranks[1].last.open


def test_processes_that_wait_for_another(tmp_path: Path):
    logs = [Writing(tmp_path, rank) for rank in range(3)]
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"processes": [{"host": "a"}] * 3}]}))
    own(tmp_path, os.getpid())
    memory = {"payload": {"metrics": {}}, "observed": {"metrics": {"memory/host_rss_bytes": 2.0**30}}}
    for rank, log in enumerate(logs):
        log.train(1, 40)
        log.add("metrics_logged", 40, **memory)
        log.add("get_batch_started", 41)
        log.seq += 20 * rank
        log.add("get_batch_completed", 41)
        if rank != 1:
            log.add("iteration_started", 41)
    run = LiveRun(tmp_path, clock=lambda: T / 1e9 + 30)
    run.update()
    assert [each.rank for each in run.stragglers] == [1]
    assert [live.memory for live in run.ranks.values()] == [("host", 2.0**30)] * 3
    assert [live.loading_seconds for live in run.ranks.values()] == pytest.approx([0.01, 0.21, 0.41])
    logs[1].add("iteration_started", 41)
    run.update()
    assert run.stragglers == []
    logs[2].add("exception_raised", 41, payload={"error": {"__type__": "builtins.ValueError", "message": "bad"}})
    run.update()
    assert [(rank, str(mark)) for rank, mark in run.marks("anomalies")] == [(2, "exception: ValueError: bad")]


def test_a_condition_selects_events_of_the_whole_log(tmp_path: Path):
    log = Writing(tmp_path)
    log.train(1, 3000)
    run = LiveRun(tmp_path)
    run.update()
    run.filter(predicate('event == "validation_completed"'))
    assert [each.event.iteration for each in run.matches] == list(range(100, 3001, 100))
    log.train(3001, 3100)
    run.update()
    assert [each.event.iteration for each in run.matches][-2:] == [3000, 3100]
    run.filter(None)
    assert not run.matches
    first = LiveRun(tmp_path, predicate('event == "validation_completed"'))
    first.update()
    assert [each.event.iteration for each in first.matches] == list(range(100, 3101, 100))


def test_a_condition_is_changed_where_only_another_process_has_new_events(tmp_path: Path):
    logs = [Writing(tmp_path, rank) for rank in range(2)]
    logs[0].train(1, 100)
    logs[1].seq = logs[0].seq  # later
    logs[1].train(1, 2000)
    run = LiveRun(tmp_path)
    run.update()
    assert {each.rank for each in run.newest} == {1}
    logs[0].writer.seal()
    run.filter(predicate('event == "validation_completed" and iteration <= 100'))
    assert [(each.rank, each.event.iteration) for each in run.matches] == [(0, 100)]


def test_a_process_that_is_read_again_does_not_hide_what_is_known_of_the_others(tmp_path: Path):
    logs = [Writing(tmp_path, rank) for rank in range(2)]
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"processes": [{"host": "a"}] * 2}]}))
    own(tmp_path, os.getpid())
    for log in logs:
        log.train(1, 20)
    logs[0].seq += 10_000  # 100 seconds
    last = logs[0].add("iteration_started", 21)
    run = LiveRun(tmp_path, clock=lambda: last.t / 1e9 + 90)
    run.update()
    assert run.status is Status.RUNNING  # it has been silent for as long before
    logs[1].writer.rewind(19, 20, logs[1].seq, T)
    logs[1].seq, logs[1].ord = logs[1].seq + 1, 20
    logs[1].train(11, 12)
    run.update()
    assert run.status is Status.RUNNING
    assert {each.rank for each in run.newest} == {0, 1}


def test_what_is_not_a_run_is_named(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(RunFolderError, match="is not a run folder; one has run"):
        LiveRun(tmp_path)
    with pytest.raises(RunFolderError, match="is not a run folder"):
        LiveRun(tmp_path / "notes.txt")
    run = LiveRun(tmp_path / "run")
    assert (run.update(), run.is_there, run.status) == (False, False, None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".owner").write_text("x")
    assert not LiveRun(tmp_path / "run").update()


def test_a_run_that_disappears_and_one_that_takes_its_place(tmp_path: Path):
    log, run = Writing(tmp_path / "run"), LiveRun(tmp_path / "run")
    log.train(1, 900)
    run.update()
    shutil.rmtree(tmp_path / "run")
    run.update()
    assert not run.is_there
    assert run.progress.iteration == 900
    again = Writing(tmp_path / "run")
    again.train(1, 5)
    run.update()
    assert run.is_there
    check_same(run)


def test_damage_and_a_newer_format_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = Writing(tmp_path / "a")
    log.train(1, 1500)
    sealed, _ = log.writer.files
    content = bytearray(sealed.read_bytes())
    content[len(content) // 2] ^= 1
    sealed.write_bytes(content)
    run = LiveRun(tmp_path / "a")
    run.update()
    assert run.damage == [str(each) for each in EventLog(tmp_path / "a").damage]
    assert "cut off in the middle of a block" in run.damage[0]
    monkeypatch.setattr("pulsetrain.engine.recording.log.writer.FORMAT", 3)
    log = Writing(tmp_path / "b")
    log.train(1, 1500)
    with pytest.raises(RecordingError, match="has format 3, and this version reads up to 2"):
        LiveRun(tmp_path / "b").update()


TRAINING = """
import sys, time, torch
from pulsetrain import Checkpointer, EventRecorder, Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, SupervisedStrategy
from pulsetrain.testing import tiny_loader, tiny_model
folder, epochs, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
def slow(engine):
    time.sleep(pause)
handlers = [EventRecorder(folder), Checkpointer(folder + "/checkpoints", every=Every(iterations=20))]
config = TrainingConfig(max_epochs=epochs, progress=False)
strategy = SupervisedStrategy("mse")
trainer = Trainer(tiny_model(), tiny_loader(), strategy=strategy, config=config, handlers=handlers)
trainer.on(Events.ITERATION_COMPLETED)(slow) if pause else None
trainer.train(resume="latest" if "resume" in sys.argv else None)
"""


@pytest.mark.slow
def test_a_real_run_is_followed_killed_and_resumed(tmp_path: Path):
    folder = tmp_path / "run"
    run = LiveRun(folder)
    delays: list[float] = []

    def follow(words: list[str], until: int | None) -> int:
        with subprocess.Popen([sys.executable, "-c", TRAINING, str(folder), *words]) as process:
            while process.poll() is None:
                seen = {(each.rank, each.event.seq) for each in run.newest}
                if run.update():
                    now = time.time_ns()
                    new = [each.event.t for each in run.newest if (each.rank, each.event.seq) not in seen]
                    delays.extend((now - t) / 1e9 for t in new[-1:])
                if until is not None and run.progress.iteration > until:
                    process.send_signal(signal.SIGKILL)
                time.sleep(0.05)
        run.update()
        check_same(run)
        return process.returncode

    assert follow(["400", "0.01"], until=50) == -signal.SIGKILL
    assert run.status is Status.KILLED
    assert follow(["60", "0.0", "resume"], until=None) == 0
    assert run.status is Status.COMPLETED
    assert sorted(delays)[len(delays) // 2] < 1.0


def test_a_folder_that_holds_only_a_configuration_may_become_a_run(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("model: {class_path: model.Net}\n")
    assert not LiveRun(tmp_path).is_there
    (tmp_path / "model.py").write_text("")
    with pytest.raises(RunFolderError, match="is not a run folder"):
        LiveRun(tmp_path)
