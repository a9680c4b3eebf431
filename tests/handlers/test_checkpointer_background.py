"""Saving beside the training: what is written, when it is announced, who waits, and what a failure costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from driving import ManualClock

from engine import CheckpointError, ConfigurationError, Engine, Events, Every, Phase, Preempted
from engine.checkpoint import CheckpointManager
from handlers import Checkpointer
from handlers.background_save import BackgroundSave
from handlers.save_interval import SaveInterval


class Trainer(Engine):
    """An engine whose step adds 1 to each weight, in place, and whose validation says what it is told."""

    def __init__(self, values: list[float] | None = None) -> None:
        super().__init__(self.step, name="trainer")
        self.weight = torch.zeros(1000)
        self.handlers: list[Any] = []
        self.values = iter(values or [])
        if values is not None:
            self.add_event_handler(Events.EPOCH_COMPLETED, self.validate, phase=Phase.COMPUTE)

    def step(self, engine: Engine, batch: object) -> None:
        self.weight.add_(1)

    def validate(self) -> None:
        self.state.metrics["val/loss"] = next(self.values)
        self.fire(Events.VALIDATION_STARTED)

    def checkpoint_state(self) -> dict[str, Any]:
        return {
            "weight": self.weight,
            "save": self.state.save,
            "handlers": [handler.state_dict() for handler in self.handlers],
        }


class Gate:
    """Holds up each write of a manager until it is opened; knows in which threads they were made."""

    def __init__(self, manager: CheckpointManager, *, opened: bool = False) -> None:
        self.opened = threading.Event()
        if opened:
            self.opened.set()
        self.threads: list[str] = []
        self.error: BaseException | None = None
        self._save = manager.save
        manager.save = self.save  # type: ignore[method-assign]

    def save(self, *args: Any, **kwargs: Any) -> Path:
        self.threads.append(threading.current_thread().name)
        assert self.opened.wait(60), "nobody opened the gate"
        if self.error is not None:
            raise self.error
        return self._save(*args, **kwargs)

    def open(self) -> None:
        self.opened.set()

    def pass_through(self) -> None:
        """Open it, and wait until the write behind it has ended."""
        self.opened.set()
        join_writers()


def join_writers() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


def saved(handler: Checkpointer) -> list[int]:
    return [int(path.name.split("-")[0]) for path in handler.manager.valid()]


def heard(engine: Engine, event: Any) -> list[Any]:
    payloads: list[Any] = []
    engine.bus.subscribe(event, lambda engine, event: payloads.append(event.payload))
    return payloads


def in_background(engine: Trainer, folder: Path, every: Every, **kwargs: Any) -> Checkpointer:
    handler = Checkpointer(folder, every, keep_last=99, background=True, **kwargs)
    engine.handlers.append(handler)
    return handler.attach(engine)


def test_it_writes_the_weights_of_the_moment_while_training_changes_them(tmp_path: Path):
    engine = Trainer()
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
        engine = Trainer([3.0, 1.0, 2.0, 0.5])
        handler = Checkpointer(
            tmp_path / str(background),
            Every(iterations=2, epochs=1),
            metric="val/loss",
            keep_last=2,
            background=background,
        ).attach(engine)
        engine.handlers.append(handler)
        payloads = heard(engine, Events.CHECKPOINT_SAVED)
        engine.run(range(3), max_epochs=4)
        loaded = [handler.manager.load(path) for path in handler.manager.valid()]
        states = [{**state, "weight": state["weight"].tolist()} for state in loaded]
        best = handler.manager.get_best()
        announced = [(payload.path.name, payload.iteration, payload.bytes, payload.is_best) for payload in payloads]
        written.append((states, best.name if best else None, handler.state_dict(), announced))
    assert written[0] == written[1]
    assert [state["handlers"][0]["saved_at"] for state in written[1][0]] == [12, 12]


def test_it_is_announced_on_the_training_thread_behind_the_iteration_in_which_the_writing_ended(tmp_path: Path):
    engine = Trainer()
    handler = in_background(engine, tmp_path, Every(iterations=4), at_end=False)
    gate = Gate(handler.manager)
    announced: list[tuple[int, int, str]] = []

    @engine.on(Events.CHECKPOINT_SAVED)
    def hear(engine: Engine, event: Any) -> None:
        assert event.payload.path.is_dir()
        announced.append((event.payload.iteration, engine.state.iteration, threading.current_thread().name))

    engine.add_event_handler(Events.ITERATION_COMPLETED(once=6), gate.pass_through)
    engine.run(range(7))
    assert announced == [(4, 6, "MainThread")]
    assert engine.state.save == 1


def test_no_two_saves_are_under_way_at_once_and_none_is_left_out(tmp_path: Path):
    engine = Trainer()
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
    engine, gate, times = Trainer(), threading.Event(), iter([1.0, 3.5])

    def clock() -> float:  # who asks for the time is about to wait
        gate.set()
        return next(times)

    background = BackgroundSave(clock)
    background.begin(engine, lambda copy, durable: durable(gate.wait(60)), undo=lambda: None)
    engine.fire = lambda event, payload: None
    assert background.settle() is False  # without waiting nothing is said yet
    assert background.writing
    with structlog.testing.capture_logs() as logs:
        background.settle(wait=True)
    assert background.waited == 2.5
    assert [line["seconds"] for line in logs] == [2.5]
    assert not background.writing


def opened_at(event: Events, engine: Trainer, gate: Gate) -> None:
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
    engine = Trainer()
    handler = in_background(engine, tmp_path, Every(iterations=4), at_end=at_end)
    gate = Gate(handler.manager)
    payloads = heard(engine, Events.CHECKPOINT_SAVED)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: end(engine))
    opened_at(event, engine, gate)
    engine.run(range(5))
    assert not handler.writing
    assert payloads[0].iteration == 4
    assert saved(handler) == [payload.iteration for payload in payloads]


def test_a_run_that_fails_waits_for_it_and_the_caller_gets_the_runs_own_error(tmp_path: Path):
    engine = Trainer()
    handler = in_background(engine, tmp_path, Every(iterations=2))
    gate = Gate(handler.manager)
    payloads = heard(engine, Events.CHECKPOINT_SAVED)
    opened_at(Events.EXCEPTION_RAISED, engine, gate)

    @engine.on(Events.ITERATION_STARTED(once=3))
    def fail() -> None:
        raise ValueError("of the run")

    with pytest.raises(ValueError, match="of the run"):
        engine.run(range(5))
    assert [payload.iteration for payload in payloads] == [2]
    assert saved(handler) == [2]


def test_the_error_of_a_failing_run_hides_no_failed_save_nor_the_other_way_round(tmp_path: Path):
    engine = Trainer()
    handler = in_background(engine, tmp_path, Every(iterations=2))
    gate = Gate(handler.manager)
    gate.error = CheckpointError("of the save")
    failures = heard(engine, Events.HANDLER_FAILED)
    opened_at(Events.EXCEPTION_RAISED, engine, gate)

    @engine.on(Events.ITERATION_STARTED(once=3))
    def fail() -> None:
        raise ValueError("of the run")

    with structlog.testing.capture_logs() as logs, pytest.raises(ValueError, match="of the run"):
        engine.run(range(5))
    assert [str(failure.error) for failure in failures] == ["of the save"]
    assert "of the save" in [line.get("error") for line in logs]


def test_what_is_saved_when_preempted_is_written_at_once_behind_the_one_under_way(tmp_path: Path):
    engine = Trainer()
    handler = in_background(engine, tmp_path, Every(iterations=4))
    gate = Gate(handler.manager)
    engine.add_event_handler(Events.PREEMPTED, lambda: engine.terminate(skip_completed=True))
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(once=5), lambda: engine.post(Events.PREEMPTED, Preempted(signal="SIGTERM"))
    )
    opened_at(Events.PREEMPTED, engine, gate)
    payloads = heard(engine, Events.CHECKPOINT_SAVED)
    engine.run(range(9))
    assert saved(handler) == [4, 5]
    assert gate.threads == ["checkpoint", "MainThread"]
    assert [payload.iteration for payload in payloads] == [4, 5]


def test_a_save_by_hand_waits_and_is_written_at_once(tmp_path: Path):
    engine = Trainer()
    handler = in_background(engine, tmp_path, Every(iterations=2), at_end=False)
    gate = Gate(handler.manager, opened=True)
    paths: list[Path] = []
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: paths.append(handler.save(engine, "mine")))
    engine.run(range(3))
    assert [path.name for path in handler.manager.valid()] == ["000000002-checkpoint", "000000003-mine"]
    assert paths == handler.manager.valid()[1:]
    assert gate.threads == ["checkpoint", "MainThread"]


def test_a_full_disk_costs_that_checkpoint_alone_and_its_ranking_is_taken_back(tmp_path: Path):
    engine = Trainer([2.0, 1.0, 3.0])
    handler = in_background(engine, tmp_path, Every(epochs=1), metric="val/loss")
    gate = Gate(handler.manager, opened=True)

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.ACT)
    def fill_and_clear() -> None:
        join_writers()
        gate.error = OSError(28, "No space left on device") if engine.state.epoch == 2 else None

    failures = heard(engine, Events.HANDLER_FAILED)
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
    engine = Trainer()
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


def test_an_error_that_is_no_full_disk_ends_the_run_at_the_next_iteration(tmp_path: Path):
    engine = Trainer()
    handler = in_background(engine, tmp_path, Every(iterations=2))
    engine.checkpoint_state = lambda: {"handlers": {"Mine": [{3}]}}
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), join_writers)
    with pytest.raises(CheckpointError, match=r"checkpoint\['handlers'\]\['Mine'\]\[0\]: set:"):
        engine.run(range(9))
    assert engine.state.iteration == 3
    assert handler.saved_at == -1
    assert saved(handler) == []


def test_detached_it_has_written_what_it_began_and_keeps_no_thread(tmp_path: Path):
    engine = Trainer()
    handler = in_background(engine, tmp_path, Every(iterations=2))
    gate = Gate(handler.manager)
    payloads = heard(engine, Events.CHECKPOINT_SAVED)

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
from engine import Engine, Events, Every
from handlers import Checkpointer

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


@pytest.mark.parametrize("call", [1, 2, 3])
def test_killed_while_a_save_is_being_written_the_one_before_is_there(call: int, tmp_path: Path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(call)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"inside\n"
        os.kill(victim.pid, signal.SIGKILL)
    manager = CheckpointManager(tmp_path / "checkpoints")
    latest = manager.get_latest()
    assert latest is not None
    assert latest.name == "000000002-checkpoint"
    assert manager.load(latest)["weight"].tolist() == [2.0] * 1000


# every="auto"


def iterate(interval: SaveInterval, clock: ManualClock, seconds: float, at_most: int = 100_000) -> int | None:
    """Iterations of so many seconds until a save is due."""
    for number in range(1, at_most + 1):
        clock.now += seconds
        if interval.is_due(None, number):
            return number
    return None


def save(interval: SaveInterval, clock: ManualClock, seconds: float) -> None:
    clock.now += seconds
    interval.saved(seconds)


@pytest.mark.parametrize("begun_at", [0, 500])
def test_memory_for_the_first_save_is_made_behind_the_tenth_iteration_of_a_run(begun_at: int, tmp_path: Path):
    engine = Trainer()
    handler = Checkpointer(tmp_path, Every(iterations=1000), at_end=False, background=True).attach(engine)
    background = handler._background
    held = []

    @engine.on(Events.STARTED)
    def go_on(engine):
        held.clear()

    @engine.on(Events.ITERATION_COMPLETED, phase=3)
    def look():
        if background._preparing is not None:
            background._preparing.join()
        held.append(background._snapshot.nbytes)

    handler._goes_on()
    engine.state.iteration = begun_at
    engine.run(range(begun_at + 20), max_epochs=1)
    assert [bytes > 0 for bytes in held[:20]] == [False] * 9 + [True] * 11


def test_the_first_save_comes_when_fifty_iterations_have_been_measured(clock: ManualClock):
    # the first look has nothing to measure from
    assert iterate(SaveInterval(clock=clock), clock, 0.25) == 51


def test_the_interval_is_the_cost_shared_out_over_iterations_of_which_it_takes_the_share(clock: ManualClock):
    interval = SaveInterval(clock=clock)
    iterate(interval, clock, 0.25)
    save(interval, clock, 2.0)
    assert iterate(interval, clock, 0.25) == 229  # 2 s / (3.5% of 0.25 s) = 228.6


def test_each_save_is_paid_for_anew(clock: ManualClock):
    interval = SaveInterval(clock=clock, share=0.125, window=4)
    iterate(interval, clock, 0.5)
    save(interval, clock, 16.0)
    assert iterate(interval, clock, 0.5) == 256
    save(interval, clock, 1.0)
    assert iterate(interval, clock, 0.5) == 16
    save(interval, clock, 1.0)
    assert iterate(interval, clock, 0.25) == 16  # the slower ones before the save were measured ...
    save(interval, clock, 1.0)
    assert iterate(interval, clock, 0.25) == 32  # ... and now the faster ones


@pytest.mark.parametrize("costs", [[0.5], [0.5, 5.0, 0.1], [3.0, 0.01, 0.02]], ids=str)
def test_saving_takes_at_most_the_share_of_the_iterations_time_whatever_it_costs(
    costs: list[float], clock: ManualClock
):
    interval = SaveInterval(clock=clock)
    training = saving = 0.0
    iterate(interval, clock, 0.01)
    for number in range(30):
        cost = costs[number % len(costs)]
        save(interval, clock, cost)
        iterations = iterate(interval, clock, 0.01)
        assert iterations is not None
        saving, training = saving + cost, training + 0.01 * iterations
        assert saving <= 0.035 * training
        if len(costs) == 1:
            assert iterations - 1 < cost / (0.035 * 0.01)  # and no iteration more than that takes


def test_a_validation_among_the_iterations_moves_nothing(clock: ManualClock):
    interval = SaveInterval(clock=clock, share=0.125, window=5)
    for number, seconds in enumerate([0.5, 0.5, 100.0, 0.5, 0.5]):
        clock.now += seconds
        assert not interval.is_due(None, number)
    assert iterate(interval, clock, 0.5) == 1
    save(interval, clock, 1.0)
    assert iterate(interval, clock, 0.5) == 16


def test_iterations_that_a_writing_thread_slows_down_are_part_of_the_cost(clock: ManualClock):
    writing = False
    interval = SaveInterval(lambda: writing, clock=clock, share=0.125, window=4)
    iterate(interval, clock, 0.5)
    save(interval, clock, 1.0)
    writing = True
    assert iterate(interval, clock, 0.75, at_most=100) is None  # however long it takes, the next does not begin
    writing = False
    # 1 s and 100 x 0.25 s; the 100 have been made already
    assert iterate(interval, clock, 0.5) == 26 * 16 - 100


def test_the_iteration_in_which_the_writing_ended_is_part_of_the_cost_and_a_validation_beside_it_is_not(
    clock: ManualClock,
):
    for seconds, cost in ((1.0, 1.5), (100.0, 1.0 + 4 * 0.5)):
        interval = SaveInterval(clock=clock, share=0.125, window=4)
        iterate(interval, clock, 0.5)
        save(interval, clock, 1.0)
        clock.now += seconds
        interval.is_due(None, 0)
        assert interval.interval == cost / (0.125 * 0.5)


def test_behind_a_save_that_failed_it_does_not_try_again_at_each_iteration(clock: ManualClock):
    interval = SaveInterval(clock=clock, window=20)
    iterate(interval, clock, 0.5)
    clock.now += 0.001
    interval.failed()
    interval.saved(0.001)
    assert iterate(interval, clock, 0.5) == 20
    save(interval, clock, 0.001)
    assert iterate(interval, clock, 0.5) == 1


def test_a_clock_that_stands_still_is_no_reason_to_fail(clock: ManualClock):
    interval = SaveInterval(clock=clock, window=8)
    assert iterate(interval, clock, 0.0) == 9
    save(interval, clock, 0.0)
    assert iterate(interval, clock, 0.0) == 8


@pytest.mark.parametrize("background", [False, True])
def test_the_checkpointer_saves_where_its_interval_says(background: bool, tmp_path: Path, clock: ManualClock):
    engine = Trainer()
    handler = Checkpointer(tmp_path, "auto", keep_last=99, at_end=False, background=background, clock=clock)
    handler.attach(engine)
    checkpoint_state = engine.checkpoint_state

    def slow() -> dict[str, Any]:
        clock.now += 0.5
        return checkpoint_state()

    engine.checkpoint_state = slow
    engine.add_event_handler(Events.ITERATION_COMPLETED, join_writers)  # the writing itself slows nothing here

    @engine.on(Events.ITERATION_STARTED)
    def tick() -> None:
        clock.now += 0.25

    engine.run(range(220))
    assert saved(handler) == [51, 51 + 67, 51 + 134]  # 0.5 s / (3% of 0.25 s) = 66.7


def test_where_auto_fails_it_waits_and_goes_on(tmp_path: Path, clock: ManualClock):
    engine = Trainer()
    handler = Checkpointer(tmp_path, "auto", background=True, at_end=False, clock=clock).attach(engine)
    gate = Gate(handler.manager, opened=True)
    gate.error = OSError(13, "Permission denied")
    engine.add_event_handler(Events.ITERATION_COMPLETED, join_writers)
    failures = heard(engine, Events.HANDLER_FAILED)

    @engine.on(Events.ITERATION_STARTED)
    def tick() -> None:
        clock.now += 0.25

    engine.run(range(160))
    assert len(gate.threads) == len(failures) == 3  # at 51, 101, 151: not at each iteration


def test_another_word_than_auto_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"Checkpointer\(every='often'\).*auto"):
        Checkpointer(tmp_path, every="often")
