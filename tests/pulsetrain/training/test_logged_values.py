"""`Trainer.log`: where a value arrives that a step, a handler or other code has logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pulsetrain import (
    Checkpointer,
    CSVLogger,
    EarlyStopping,
    EventLog,
    EventRecorder,
    Events,
    Every,
    Trainer,
    TrainingConfig,
)
from pulsetrain.engine import LAST, Phase, SupervisedStrategy
from pulsetrain.testing import RecordedEvents, tiny_loader, tiny_model


def make(handlers: list[Any] | None = None, validates: bool = False, **settings: Any) -> Trainer:
    config = TrainingConfig(**{"log_every_n_steps": 2, "seed": 0, "progress": False, **settings})
    return Trainer(
        tiny_model(), tiny_loader(), tiny_loader() if validates else None, strategy=SupervisedStrategy("mse"),
        config=config, handlers=handlers or [],
    )  # fmt: skip


def log_iteration(trainer: Trainer, name: str = "counted") -> None:
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: engine.log(name, engine.state.iteration), phase=Phase.COMPUTE
    )


def test_a_log_point_reports_the_mean_since_the_last_one():
    trainer = make()
    log_iteration(trainer)
    events = RecordedEvents(trainer, passive=False)
    history = trainer.train()
    assert [each.metrics["counted"] for each in events.payloads(Events.METRICS_LOGGED)] == [1.5, 3.5]
    assert history["counted"] == [2.5]
    assert trainer.state.metrics["counted"] == 4


def test_loggers_and_the_recorder_get_it(tmp_path: Path):
    trainer = make([EventRecorder(tmp_path), CSVLogger(tmp_path)])
    log_iteration(trainer)
    trainer.train()
    logged = [each.payload["metrics"] for each in EventLog(tmp_path).read(event="metrics_logged")]
    assert [each["counted"] for each in logged] == [1.5, 3.5]
    assert "counted" in (tmp_path / "metrics.csv").read_text().splitlines()[0]


def test_a_name_of_a_validation_set_goes_with_the_validation_and_stops_early():
    trainer = make([EarlyStopping("val/bleu", patience=1, mode="max")], validates=True, max_epochs=5)

    @trainer.on(Events.VALIDATION_STARTED)
    def judge(engine: Trainer) -> None:
        for value in (0.0, 1.0):
            engine.log("val/bleu", value)

    events = RecordedEvents(trainer, passive=False)
    history = trainer.train()
    assert [each.metrics["val/bleu"] for each in events.payloads(Events.VALIDATION_COMPLETED)] == [0.5, 0.5]
    assert trainer.state.epoch == 2
    assert history["val/bleu"] == [0.5, 0.5]
    assert all("val/bleu" not in each.metrics for each in events.payloads(Events.METRICS_LOGGED))


def test_log_points_that_nobody_hears_leave_it_to_the_validation():
    trainer = make([EarlyStopping("val/fid", patience=1, mode="min")], validates=True, max_epochs=2)
    log_iteration(trainer, "val/fid")
    log_iteration(trainer, "counted")
    history = trainer.train()
    assert history["val/fid"] == [2.5, 6.5]
    assert history["counted"] == [2.5, 6.5]


def test_names_of_the_trainer_keep_its_values():
    trainer = make()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: engine.log("train/loss", 1e9))
    assert trainer.train()["train/loss"][0] < 1e6


def test_a_tensor_is_logged_without_its_graph():
    trainer = make()
    weight = torch.ones(1, requires_grad=True)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: engine.log("norm", (weight * 3).sum()))
    assert trainer.train()["norm"] == [3.0]
    assert not trainer.state.metrics["norm"].requires_grad


def test_what_was_not_reported_yet_is_in_the_checkpoints(tmp_path: Path):
    def build(folder: Path) -> tuple[Trainer, RecordedEvents]:
        trainer = make([Checkpointer(folder, every=Every(iterations=1))], log_every_n_steps=4)
        log_iteration(trainer)
        return trainer, RecordedEvents(trainer, passive=False)

    class CutError(Exception):
        pass

    whole, expected = build(tmp_path / "whole")
    whole.train()
    cut, _ = build(tmp_path / "cut")

    def stop() -> None:
        raise CutError

    cut.bus.subscribe(Events.ITERATION_COMPLETED(once=3), stop, sender=cut, phase=Phase.PERSIST, order=LAST)
    with pytest.raises(CutError):
        cut.train()
    resumed, found = build(tmp_path / "cut")
    history = resumed.train(resume="latest")
    assert found.payloads(Events.METRICS_LOGGED)[-1].metrics["counted"] == 2.5
    assert expected.payloads(Events.METRICS_LOGGED)[-1].metrics["counted"] == 2.5
    assert history["counted"] == whole.history["counted"] == [2.5]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("", 1.0, r"Trainer\.log\(name=''\): needs a name"),
        (3, 1.0, r"Trainer\.log\(name=3\): needs a name"),
        ("a", "text", "'a' needs one number, not str"),
        ("a", [1.0, 2.0], "'a' needs one number, not list"),
        ("a", torch.ones(2), r"'a' has the shape \(2,\); needs one number"),
    ],
    ids=["empty", "number", "text", "list", "vector"],
)
def test_what_is_not_one_number_by_name_is_refused(name: Any, value: Any, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        make().log(name, value)
