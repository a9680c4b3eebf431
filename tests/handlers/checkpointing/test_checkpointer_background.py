"""Saving in the background: what is written, when it is announced, what waits, and what a failure costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from pulsetrain.engine import CheckpointError, Engine, Events, Every, Phase, Preempted
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.handlers import Checkpointer
from pulsetrain.handlers.checkpointing.background_save import BackgroundSave
from tests.support.engines import Gate, SavingEngine, in_background, join_writers, payloads_of, saved
from tests.support.programs import Program


def test_it_writes_the_weights_of_the_moment_while_training_changes_them(tmp_path: Path):
    engine = SavingEngine()
    handler = in_background(engine, tmp_path, Every(iterations=2), at_end=False)
    gate = Gate(handler.manager)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), gate.open)
    engine.run(range(5))
    assert saved(handler) == [2, 4]
    for path, value in zip(handler.manager.valid(), (2.0, 4.0), strict=True):
        assert handler.manager.load(path)["weight"].tolist() == [value] * 1000
    assert gate.threads == ["checkpoint", "checkpoint"]


def test_what_it_writes_equals_what_the_synchronous_form_writes(tmp_path: Path):
    written = []
    for background in (False, True):
        engine = SavingEngine([3.0, 1.0, 2.0, 0.5])
        handler = Checkpointer(
            tmp_path / str(background),
            Every(iterations=2, epochs=1),
            metric="val/loss",
            keep_last=2,
            background=background,
        ).attach(engine)
        engine.handlers.append(handler)
        payloads = payloads_of(engine, Events.CHECKPOINT_SAVED)
        engine.run(range(3), max_epochs=4)
        loaded = [handler.manager.load(path) for path in handler.manager.valid()]
        states = [{**state, "weight": state["weight"].tolist()} for state in loaded]
        best = handler.manager.get_best()
        announced = [(payload.path.name, payload.iteration, payload.bytes, payload.is_best) for payload in payloads]
        written.append((states, best.name if best else None, handler.state_dict(), announced))
    assert written[0] == written[1]
    assert [state["handlers"][0]["saved_at"] for state in written[1][0]] == [12, 12]


def test_it_is_announced_on_the_training_thread_after_the_iteration_in_which_the_writing_ended(tmp_path: Path):
    engine = SavingEngine()
    handler = in_background(engine, tmp_path, Every(iterations=4), at_end=False)
    gate = Gate(handler.manager)
    announced: list[tuple[int, int, str]] = []

    @engine.on(Events.CHECKPOINT_SAVED)
    def note(engine: Engine, event: Any) -> None:
        assert event.payload.path.is_dir()
        announced.append((event.payload.iteration, engine.state.iteration, threading.current_thread().name))

    engine.add_event_handler(Events.ITERATION_COMPLETED(once=6), gate.pass_through)
    engine.run(range(7))
    assert announced == [(4, 6, "MainThread")]
    assert engine.state.save == 1


@pytest.mark.parametrize("background", [False, True])
def test_older_ones_are_deleted_only_after_it_is_announced(background: bool, tmp_path: Path):
    """A handler of CHECKPOINT_SAVED can still read the one before: it may be the only copy elsewhere."""
    engine = SavingEngine()
    handler = Checkpointer(tmp_path, Every(iterations=2), keep_last=1, background=background, at_end=False)
    handler.attach(engine)
    present: list[list[str]] = []

    @engine.on(Events.CHECKPOINT_SAVED)
    def look() -> None:
        present.append([path.name for path in handler.manager.valid()])

    engine.run(range(6))
    handler.wait()
    assert [len(each) for each in present] == [1, 2, 2]
    assert len(handler.manager.valid()) == 1


def test_an_error_while_older_ones_are_deleted_reaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = SavingEngine()
    handler = in_background(engine, tmp_path, Every(iterations=2), at_end=False)

    def fail(keep: object) -> None:
        raise RuntimeError("the storage refused")

    monkeypatch.setattr(handler.manager, "prune", fail)
    with pytest.raises(RuntimeError, match="the storage refused"):
        engine.run(range(6))


def test_no_two_saves_are_under_way_at_once_and_none_is_left_out(tmp_path: Path):
    engine = SavingEngine()
    handler = in_background(engine, tmp_path, Every(iterations=1))
    active, most = 0, 0
    save = handler.manager.save

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal active, most
        active += 1
        most = max(most, active)
        try:
            return save(*args, **kwargs)
        finally:
            active -= 1

    handler.manager.save = counted
    engine.run(range(12))
    assert most == 1
    assert saved(handler) == list(range(1, 13))
    assert [handler.manager.load(path)["save"] for path in handler.manager.valid()] == list(range(12))


def test_the_time_that_training_waits_for_a_save_is_measured_and_logged():
    gate, times = threading.Event(), iter([1.0, 3.5])

    def clock() -> float:  # who asks for the time is about to wait
        gate.set()
        return next(times)

    background = BackgroundSave(clock)
    background.begin({}, 4, lambda copy, durable: durable(gate.wait(60)), lambda event, payload: None, lambda: None)
    assert background.settle() is False  # without waiting nothing is said yet
    assert background.writing
    with structlog.testing.capture_logs() as logs:
        background.settle(wait=True)
    assert background.waited == 2.5
    assert [line["seconds"] for line in logs] == [2.5]
    assert not background.writing


def opened_at(event: Events, engine: SavingEngine, gate: Gate) -> None:
    engine.bus.subscribe(event, lambda *_: gate.open(), phase=Phase.COMPUTE)


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize(
    ("end", "event"),
    [
        (lambda engine: None, Events.COMPLETED),
        (lambda engine: engine.terminate(), Events.TERMINATE),
        (lambda engine: engine.terminate(skip_completed=True), Events.TERMINATE),
        (lambda engine: engine.interrupt(), Events.INTERRUPT),
    ],
    ids=["bound", "terminate", "terminate without COMPLETED", "interrupt"],
)
def test_the_end_of_the_run_waits_for_it(end: Callable[[Engine], None], event: Events, at_end: bool, tmp_path: Path):
    engine = SavingEngine()
    handler = in_background(engine, tmp_path, Every(iterations=4), at_end=at_end)
    gate = Gate(handler.manager)
    payloads = payloads_of(engine, Events.CHECKPOINT_SAVED)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: end(engine))
    opened_at(event, engine, gate)
    engine.run(range(5))
    assert not handler.writing
    assert payloads[0].iteration == 4
    assert saved(handler) == [payload.iteration for payload in payloads]


def test_a_run_that_fails_waits_for_it_and_the_caller_gets_the_runs_own_error(tmp_path: Path):
    engine = SavingEngine()
    handler = in_background(engine, tmp_path, Every(iterations=2))
    gate = Gate(handler.manager)
    payloads = payloads_of(engine, Events.CHECKPOINT_SAVED)
    opened_at(Events.EXCEPTION_RAISED, engine, gate)

    @engine.on(Events.ITERATION_STARTED(once=3))
    def fail() -> None:
        raise ValueError("of the run")

    with pytest.raises(ValueError, match="of the run"):
        engine.run(range(5))
    assert [payload.iteration for payload in payloads] == [2]
    assert saved(handler) == [2]


def test_a_failing_runs_error_and_a_failed_saves_error_are_both_reported(tmp_path: Path):
    engine = SavingEngine()
    handler = in_background(engine, tmp_path, Every(iterations=2))
    gate = Gate(handler.manager)
    gate.error = CheckpointError("of the save")
    failures = payloads_of(engine, Events.HANDLER_FAILED)
    opened_at(Events.EXCEPTION_RAISED, engine, gate)

    @engine.on(Events.ITERATION_STARTED(once=3))
    def fail() -> None:
        raise ValueError("of the run")

    with structlog.testing.capture_logs() as logs, pytest.raises(ValueError, match="of the run"):
        engine.run(range(5))
    assert [str(failure.error) for failure in failures] == ["of the save"]
    assert "of the save" in [line.get("error") for line in logs]


def test_what_is_saved_when_preempted_is_written_at_once_after_the_one_under_way(tmp_path: Path):
    engine = SavingEngine()
    handler = in_background(engine, tmp_path, Every(iterations=4))
    gate = Gate(handler.manager)
    engine.add_event_handler(Events.PREEMPTED, lambda: engine.terminate(skip_completed=True))
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(once=5), lambda: engine.post(Events.PREEMPTED, Preempted(signal="SIGTERM"))
    )
    opened_at(Events.PREEMPTED, engine, gate)
    payloads = payloads_of(engine, Events.CHECKPOINT_SAVED)
    engine.run(range(9))
    assert saved(handler) == [4, 5]
    assert gate.threads == ["checkpoint", "MainThread"]
    assert [payload.iteration for payload in payloads] == [4, 5]


def test_a_save_by_hand_waits_and_is_written_at_once(tmp_path: Path):
    engine = SavingEngine()
    handler = in_background(engine, tmp_path, Every(iterations=2), at_end=False)
    gate = Gate(handler.manager, opened=True)
    paths: list[Path] = []
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: paths.append(handler.save(engine, "mine")))
    engine.run(range(3))
    assert [path.name for path in handler.manager.valid()] == ["000000002-checkpoint", "000000003-mine"]
    assert paths == handler.manager.valid()[1:]
    assert gate.threads == ["checkpoint", "MainThread"]


def test_a_full_disk_loses_only_that_checkpoint_and_its_rank(tmp_path: Path):
    engine = SavingEngine([2.0, 1.0, 3.0])
    handler = in_background(engine, tmp_path, Every(epochs=1), metric="val/loss")
    gate = Gate(handler.manager, opened=True)

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.ACT)
    def fill_and_clear() -> None:
        join_writers()
        gate.error = OSError(28, "No space left on device") if engine.state.epoch == 2 else None

    failures = payloads_of(engine, Events.HANDLER_FAILED)
    with structlog.testing.capture_logs() as logs:
        engine.run(range(2), max_epochs=3)
    assert saved(handler) == [2, 6]
    (failure,) = failures
    assert isinstance(failure.error, OSError)
    assert failure.event == Events.CHECKPOINT_SAVED.value
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert "No space left" in line["error"]
    assert line["iteration"] == 4
    # the lost checkpoint, of the best value, is not in the ranking
    assert handler.best == [(2.0, "000000002-checkpoint")]
    (inside,) = handler.manager.load(handler.manager.valid()[-1])["handlers"]
    assert inside["best"] == [[2.0, "000000002-checkpoint"]]


def test_the_last_save_is_tried_again_at_the_end_where_it_failed(tmp_path: Path):
    engine = SavingEngine()
    handler = in_background(engine, tmp_path, Every(iterations=3))
    gate = Gate(handler.manager)
    gate.error = OSError(28, "No space left on device")

    @engine.on(Events.COMPLETED, phase=Phase.COMPUTE)
    def clear() -> None:
        gate.pass_through()
        gate.error = None

    engine.run(range(3))
    assert gate.threads == ["checkpoint", "MainThread"]
    assert saved(handler) == [3]


def test_an_error_that_is_not_a_full_disk_ends_the_run_at_the_next_iteration(tmp_path: Path):
    engine = SavingEngine()
    handler = in_background(engine, tmp_path, Every(iterations=2))
    engine.checkpoint_state = lambda: {"handlers": {"Mine": [{3}]}}
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), join_writers)
    with pytest.raises(CheckpointError, match=r"checkpoint\['handlers'\]\['Mine'\]\[0\]: set:"):
        engine.run(range(9))
    assert engine.state.iteration == 3
    assert handler.saved_at == -1
    assert saved(handler) == []


def test_detached_it_has_written_what_it_began_and_keeps_no_thread(tmp_path: Path):
    engine = SavingEngine()
    handler = in_background(engine, tmp_path, Every(iterations=2))
    gate = Gate(handler.manager)
    payloads = payloads_of(engine, Events.CHECKPOINT_SAVED)

    @engine.on(Events.ITERATION_COMPLETED(once=3))
    def detach() -> None:
        gate.open()
        handler.detach()

    engine.run(range(6))
    assert saved(handler) == [2]
    assert [payload.iteration for payload in payloads] == [2]
    assert [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"] == []


KILLED = """
import os, sys, threading
import torch
from pulsetrain.engine import Engine, Events, Every
from pulsetrain.handlers import Checkpointer

class Trainer(Engine):
    def checkpoint_state(self):
        return {"weight": torch.full((1000,), float(self.state.iteration))}

engine = Trainer(lambda engine, batch: None, name="trainer")
Checkpointer(sys.argv[1], Every(iterations=2), background=True).attach(engine)
sync, inside, syncs = os.fsync, threading.Event(), []

def fsync(descriptor):
    syncs.append(descriptor)
    if engine.state.iteration > 3 and len(syncs) == first + int(sys.argv[2]):
        inside.set()
        threading.Event().wait()
    sync(descriptor)

os.fsync, first = fsync, 10**9

@engine.on(Events.ITERATION_COMPLETED(once=3))
def written():
    global first
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    first = len(syncs)

@engine.on(Events.ITERATION_COMPLETED(once=5))
def kill_me():
    inside.wait()
    print("inside", flush=True)
    sys.stdin.read()

engine.run(range(6))
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2, 3])
def test_killed_while_a_save_is_being_written_the_one_before_is_there(call: int, tmp_path: Path):
    victim = Program("-c", KILLED, tmp_path, call)
    assert victim.stdout.readline() == "inside\n"
    victim.close()  # it is killed
    manager = CheckpointManager(tmp_path / "checkpoints")
    latest = manager.get_latest()
    assert latest is not None
    assert latest.name == "000000002-checkpoint"
    assert manager.load(latest)["weight"].tolist() == [2.0] * 1000
