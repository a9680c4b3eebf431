"""When the Checkpointer saves, which checkpoint it calls the best, and what a failed save costs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import structlog

from engine import Engine, Events, Every, MetricNotFoundError, Preempted
from handlers import Checkpointer


class Trainer(Engine):
    """An engine with a state to save, and a validation that says what it is told."""

    def __init__(self, values: list[float] | None = None) -> None:
        super().__init__(lambda engine, batch: None, name="trainer")
        self.values = iter(values or [])
        if values is not None:
            self.add_event_handler(Events.EPOCH_COMPLETED, self.validate, phase=0)

    def validate(self) -> None:
        self.state.metrics["val/loss"] = next(self.values)
        self.fire(Events.VALIDATION_STARTED)

    def checkpoint_state(self) -> dict[str, Any]:
        return {"iteration": self.state.iteration}


def saved(handler: Checkpointer) -> list[int]:
    return [int(path.name.split("-")[0]) for path in handler.manager.valid()]


def test_it_saves_by_its_cadences_and_once_where_they_meet(tmp_path: Path):
    engine = Trainer()
    handler = Checkpointer(tmp_path, every=Every(iterations=2) | Every(epochs=1), keep_last=9).attach(engine)
    engine.run(range(4), max_epochs=2)
    assert saved(handler) == [2, 4, 6, 8]


def test_the_end_of_a_run_is_saved_too_unless_told_otherwise(tmp_path: Path):
    for at_end, expected in ((True, [3]), (False, [])):
        engine = Trainer()
        handler = Checkpointer(tmp_path / str(at_end), every=Every(epochs=9), at_end=at_end).attach(engine)
        engine.run(range(3))
        assert saved(handler) == expected


def test_a_preemption_is_saved_at_the_safe_point(tmp_path: Path):
    engine = Trainer()
    handler = Checkpointer(tmp_path, every=Every(epochs=9), at_end=True).attach(engine)
    engine.add_event_handler(Events.PREEMPTED, lambda: engine.terminate(skip_completed=True))
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(once=5), lambda: engine.post(Events.PREEMPTED, Preempted(signal="SIGTERM"))
    )
    engine.run(range(9))
    assert saved(handler) == [5]


def test_the_best_stays_and_is_pointed_to(tmp_path: Path):
    engine = Trainer([3.0, 1.0, 2.0, float("nan"), 1.5])
    handler = Checkpointer(tmp_path, metric="val/loss", keep_last=1).attach(engine)
    events: list[bool] = []
    engine.add_event_handler(Events.CHECKPOINT_SAVED, lambda engine, event: events.append(event.payload.is_best))
    engine.run(range(2), max_epochs=5)
    assert saved(handler) == [4, 10]
    assert handler.manager.get_best().name.startswith("000000004")
    assert events == [True, True, False, False, False]


def test_the_largest_may_be_best_and_two_of_them_stay(tmp_path: Path):
    engine = Trainer([1.0, 3.0, 2.0, 0.0])
    handler = Checkpointer(tmp_path, metric="val_loss", mode="max", keep_last=1, keep_best=2).attach(engine)
    engine.run(range(1), max_epochs=4)
    assert saved(handler) == [2, 3, 4]


def test_one_validation_is_ranked_once(tmp_path: Path):
    engine = Trainer([1.0, 2.0])
    handler = Checkpointer(tmp_path, every=Every(iterations=1), metric="val/loss", keep_best=3, keep_last=9)
    handler.attach(engine)
    engine.run(range(3), max_epochs=2)
    # epoch 1 ends behind iteration 3: its own save takes the metric, those of epoch 2 do not take it again
    assert [value for value, _ in handler.best] == [1.0, 2.0]


def test_its_announcement_says_what_was_written(tmp_path: Path):
    engine = Trainer()
    Checkpointer(tmp_path).attach(engine)
    payloads: list[Any] = []
    engine.add_event_handler(Events.CHECKPOINT_SAVED, lambda engine, event: payloads.append(event.payload))
    engine.run(range(3))
    (payload,) = payloads
    assert payload.path.is_dir()
    assert payload.iteration == 3
    assert payload.bytes == sum(file.stat().st_size for file in payload.path.iterdir())
    assert engine.state.save == 1


def test_a_full_disk_costs_that_checkpoint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = Trainer()
    handler = Checkpointer(tmp_path, every=Every(iterations=1), keep_last=9).attach(engine)
    real = os.fsync

    def sometimes(descriptor: int) -> None:
        if engine.state.iteration == 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sometimes)
    with structlog.testing.capture_logs() as logs:
        engine.run(range(3))
    assert saved(handler) == [1, 3]
    (line,) = logs
    assert "No space left" in line["error"]
    assert line["iteration"] == 2


def test_progress_survives_a_round_trip(tmp_path: Path):
    engine = Trainer([3.0, 1.0])
    handler = Checkpointer(tmp_path, metric="val/loss").attach(engine)
    engine.run(range(2), max_epochs=2)
    other = Checkpointer(tmp_path, metric="val/loss")
    other.load_state_dict(handler.state_dict())
    assert other.state_dict() == handler.state_dict()
    assert other.best[0][0] == 1.0


def test_a_metric_that_no_validation_brings_is_named(tmp_path: Path):
    engine = Trainer([1.0])
    Checkpointer(tmp_path, metric="val/accuracy").attach(engine)
    with pytest.raises(MetricNotFoundError, match="val/loss"):
        engine.run(range(2))


def test_detached_it_saves_no_more_and_attached_twice_is_an_error(tmp_path: Path):
    engine = Trainer()
    handler = Checkpointer(tmp_path).attach(engine)
    with pytest.raises(RuntimeError, match="attached already"):
        handler.attach(engine)
    handler.detach()
    engine.run(range(2))
    assert saved(handler) == []


def test_an_engine_without_a_state_to_save_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match="checkpoint_state"):
        Checkpointer(tmp_path).attach(Engine(lambda engine, batch: None))


@pytest.mark.parametrize(("argument", "says"), [({"keep_best": 0}, "keep_best"), ({"mode": "least"}, "'min' or 'max'")])
def test_bad_arguments_are_refused_at_once(argument: dict[str, Any], says: str, tmp_path: Path):
    with pytest.raises(ValueError, match=says):
        Checkpointer(tmp_path, **argument)
