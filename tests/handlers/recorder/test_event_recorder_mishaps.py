"""The recorder continues and loses nothing, whatever it is given and wherever it is attached."""

from __future__ import annotations

import shutil
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pulsetrain import Trainer
from pulsetrain.engine import ConfigurationError, Engine, Events
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.log.stall import StallWatch
from pulsetrain.engine.recording.where import positions
from pulsetrain.handlers import Checkpointer, EventRecorder
from tests.support.models import loader, trainer


class Raising:
    @property
    def metrics(self) -> dict[str, float]:
        raise RuntimeError("no")


class Items(dict[str, float]):
    def items(self) -> Any:
        raise RuntimeError("no")


@pytest.mark.parametrize("output", [Raising(), Items(a=1.0), {"loss": Fraction(10**400)}])
def test_an_output_that_cannot_be_looked_at_is_summarised(output: Any, tmp_path: Path):
    trainer = Engine(lambda engine, batch: output, name="trainer")
    EventRecorder(tmp_path).attach(trainer)
    trainer.run([1, 2])
    found = [event.output for event in EventLog(tmp_path).read(event="iteration_completed")]
    assert len(found) == 2
    assert "__type__" in str(found[0])


def test_an_event_whose_name_is_not_a_text_is_recorded_under_another(tmp_path: Path):
    trainer = Engine(lambda engine, batch: engine.fire("odd\udc80"), name="trainer")
    trainer.register_events("odd\udc80")
    EventRecorder(tmp_path).attach(trainer)
    trainer.run([1, 2])
    assert len(list(EventLog(tmp_path).read(event="odd\\udc80"))) == 2


def test_attached_in_mid_run_the_log_continues_to_the_outer_runs_end(tmp_path: Path):
    trainer = Engine(lambda engine, batch: 0.5, name="trainer")
    evaluator = Engine(lambda engine, batch: 1.0, name="evaluator", bus=trainer.bus)
    recorder = EventRecorder(tmp_path)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: recorder.attach(trainer))

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine: Engine) -> None:
        evaluator.run([0], max_epochs=1)
        engine.state.metrics["val/loss"] = 1.0

    trainer.run([1, 2, 3], max_epochs=1)
    log = EventLog(tmp_path)
    (found,) = log.read(engine="trainer", event="epoch_completed")
    assert (found.open, found.metrics) == (False, {"val/loss": 1.0})
    assert log.ended
    assert next(log.read(engine="trainer", event="completed"), None) is not None


def test_attached_in_mid_run_it_records_an_error_that_is_the_first_event(tmp_path: Path):
    def fail(engine: Engine, batch: int) -> float:
        if batch == 2:
            raise ArithmeticError("too large")
        return 0.5

    trainer = Engine(fail, name="trainer")
    recorder = EventRecorder(tmp_path, every=10)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: recorder.attach(trainer))
    with pytest.raises(ArithmeticError):
        trainer.run([1, 2, 3], max_epochs=1)
    assert [event.event for event in EventLog(tmp_path).read()] == ["exception_raised"]


def test_a_run_that_starts_over_where_one_was_killed_supersedes_it(tmp_path: Path):
    def run() -> Trainer:
        handlers = [EventRecorder(tmp_path / "run"), Checkpointer(tmp_path / "run", at_end=False)]
        return trainer({"max_epochs": 1, "seed": 0}, train_loader=loader(16), handlers=handlers)

    first = run()
    kill = Events.ITERATION_COMPLETED(once=3)
    first.add_event_handler(kill, lambda: shutil.copytree(tmp_path / "run", tmp_path / "killed") and None)
    first.train()
    shutil.rmtree(tmp_path / "run")
    shutil.move(tmp_path / "killed", tmp_path / "run")
    assert not EventLog(tmp_path / "run").ended
    run().train(resume="latest")
    log = EventLog(tmp_path / "run")
    kept = [event.iteration for event in log.read(event="iteration_completed")]
    everything = [event.iteration for event in log.read(event="iteration_completed", superseded=True)]
    assert (kept, everything) == ([1, 2, 3, 4], [1, 2, 3, 1, 2, 3, 4])
    ords = [event.ord for event in log.read() if event.ord >= 0]
    assert ords == list(range(len(ords)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rank": -1}, "rank=-1"),
        ({"rank": "a"}, "rank='a'"),
        ({"max_bytes": 5}, "at least 100000"),
        ({"max_bytes": "x"}, "max_bytes='x'"),
        ({"on_error": "bla"}, "choose one of raise, warn"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], said: str, tmp_path: Path):
    with pytest.raises(ConfigurationError, match=said):
        EventRecorder(tmp_path, **arguments)


def test_each_rank_writes_a_log_of_its_own(tmp_path: Path):
    for rank in (0, 1):
        trainer = Engine(lambda engine, batch: 0.5, name="trainer")
        EventRecorder(tmp_path, rank=rank, max_bytes=100_000).attach(trainer)
        trainer.run(range(3 + rank), max_epochs=1)
    lengths = [len(list(EventLog(tmp_path, rank).read(event="iteration_completed"))) for rank in (0, 1)]
    assert lengths == [3, 4]


def test_where_a_single_process_hangs_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StallWatch.__init__, "__defaults__", (0.05,))  # seconds between two looks
    training = trainer(handlers=[EventRecorder(tmp_path)])
    stacks = []

    @training.on(Events.ITERATION_COMPLETED(once=2))
    def hang() -> None:
        until = time.monotonic() + 60
        while not stacks and time.monotonic() < until:
            stacks.extend(each.stall.stack for each in positions(tmp_path) if each.stall is not None)
            time.sleep(0.05)

    training.train()
    assert any(place.endswith(" hang") for place in stacks[0])
