"""A cadence of updates is due by the run's number of updates, wherever a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulsetrain import Checkpointer, Every, Trainer, TrainingConfig
from pulsetrain.engine import Engine, Events, SupervisedStrategy
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EventRecorder
from pulsetrain.handlers.attachment.cadence import reading_events
from pulsetrain.testing import tiny_loader, tiny_model
from tests.support.engines import UpdatingEngine


def make(folder: Path, updates: int, due: list[int]) -> Trainer:
    config = TrainingConfig(max_epochs=None, max_updates=updates, seed=0, progress=False, schedule=None)
    made = Trainer(
        tiny_model(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=config,
        handlers=[Checkpointer(folder, Every(iterations=1000))],
    )  # fmt: skip
    made.add_event_handler(reading_events(Every(updates=10)), lambda engine: due.append(engine.state.update))
    return made


@pytest.mark.parametrize("trained", [False, True], ids=["a fresh process", "a process that has trained"])
def test_a_run_that_continues_from_a_checkpoint_is_due_at_multiples(tmp_path: Path, trained: bool):
    first = make(tmp_path / "first", 23, [])
    first.train()
    path = first.save_checkpoint()
    due: list[int] = []
    run = make(tmp_path / "second", 32, due)
    if trained:
        run.on(Events.ITERATION_COMPLETED(once=5))(lambda engine: engine.terminate())
        run.train()
    run.load_checkpoint(path)
    run.train()
    assert (run.state.update, due) == (32, [30])


def test_a_run_from_the_start_is_due_as_the_one_before():
    engine, due = UpdatingEngine(), list[int]()
    engine.add_event_handler(reading_events(Every(updates=1)), lambda engine: due.append(engine.state.update))
    for _ in range(2):
        engine.state.update = 0
        engine.run([0] * 3, max_epochs=1)
    assert due == [1, 2, 3, 1, 2, 3]


def test_a_replay_of_a_log_that_leaves_iterations_out_is_due_once_at_an_update(tmp_path: Path):
    engine, due = UpdatingEngine(accumulate=20), list[int]()
    EventRecorder(tmp_path, every=2).attach(engine)
    engine.run([0] * 90, max_epochs=1)
    replay = Replay(tmp_path)
    replay.add_event_handler(reading_events(Every(updates=2)), lambda engine: due.append(engine.state.iteration))
    replay.run()
    assert due == [80], "at the second of the updates in the log, which are those at 40 and 80"


def test_engines_of_one_bus_are_counted_apart():
    engine, due = UpdatingEngine(), list[int]()
    evaluator = Engine(lambda engine, batch: None, name="evaluator", bus=engine.bus)
    for event in reading_events(Every(updates=3)):
        engine.bus.subscribe(event, lambda engine: due.append(engine.state.update))
    engine.on(Events.EPOCH_COMPLETED)(lambda: evaluator.run([0]))
    engine.run([0] * 4, max_epochs=2)
    assert due == [3, 6]
