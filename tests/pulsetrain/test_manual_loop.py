"""A manual loop has the events, the recording and the exact resume of a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn

from pulsetrain import Loop, TrainingConfig
from pulsetrain.engine import ConfigurationError, Events, Every, SupervisedStrategy, TorchBackend
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import EMA, Checkpointer, CSVLogger, EventRecorder
from tests.support.models import loader, regression_model


def make(folder: Path, **config: Any) -> Loop:
    model = regression_model(dropout=0.3)
    settings = {"max_epochs": 3, "seed": 4, "schedule": "cosine", "warmup_steps": 2, "log_every_n_steps": 4, **config}
    return Loop(
        model,
        loader(),
        loader(12, shuffle=False),
        strategy=SupervisedStrategy("mse"),  # of the validation
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config=TrainingConfig(**settings),
        handlers=[
            EMA(0.9), Checkpointer(folder, every=Every(iterations=1)), EventRecorder(folder), CSVLogger(folder)
        ],
    )  # fmt: skip


def train(loop: Loop, until: int | None = None, resume: str | None = None) -> None:
    """Two batches an update."""
    for inputs, targets in loop.batches(resume):
        if loop.state.iteration == until:
            return
        loss = nn.functional.mse_loss(loop.model(inputs), targets)
        (loss / 2).backward()
        if loop.state.iteration % 2 == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.output = loss


def weights(loop: Loop) -> list[torch.Tensor]:
    return [value.clone() for value in loop.model.state_dict().values()]


def test_every_event_of_a_trainer_is_fired_around_the_body(tmp_path: Path):
    loop = make(tmp_path)
    seen: list[str] = []

    @loop.on(Events.ITERATION_STARTED | Events.GRADIENTS_READY | Events.OPTIMIZER_STEP_COMPLETED)
    def note(engine: Loop, event: Any) -> None:
        seen.append(event.type)

    train(loop)
    pair = ["iteration_started", "iteration_started", "gradients_ready", "optimizer_step_completed"]
    assert seen == pair * 15
    assert loop.state.update == 15
    assert loop.state.epoch == 3
    assert len(loop.history.get_history()["val/loss"]) == 3
    losses = [event.output["loss"] for event in EventLog(tmp_path).read(engine=loop.name, event="iteration_completed")]
    assert len(losses) == 30
    assert all(loss > 0 for loss in losses)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [2, 5, 12, 30])
def test_a_loop_that_was_left_resumes_to_the_same_weights(cut: int, tmp_path: Path):
    whole = make(tmp_path / "whole")
    train(whole)
    loop = make(tmp_path / "cut")
    train(loop, until=cut)
    assert loop.state.stop_reason == "the loop was left"
    torch.manual_seed(99)
    again = make(tmp_path / "cut")
    train(again, resume="latest")
    assert again.state.iteration == 30
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(again), strict=True))
    recorder = again.handlers[2]
    assert recorder.resume_check is None or recorder.resume_check.difference is None
    logs = [list(EventLog(tmp_path / name).read(event="iteration_completed")) for name in ("whole", "cut")]
    assert [e.output for e in logs[0]] == [e.output for e in logs[1]]


def test_an_error_in_the_body_leaves_a_log_and_checkpoints_to_resume_from(tmp_path: Path):
    loop = make(tmp_path)

    def body() -> None:
        for _ in loop.batches():
            if loop.state.iteration == 7:
                raise ZeroDivisionError
            loop.output = torch.ones(())

    with pytest.raises(ZeroDivisionError):
        body()
    again = make(tmp_path)
    train(again, resume="latest")
    assert again.state.iteration == 30


def test_it_ends_where_a_handler_terminates_it(tmp_path: Path):
    loop = make(tmp_path)
    loop.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda engine: engine.terminate(reason="enough"))
    train(loop)
    assert (loop.state.iteration, loop.state.stop_reason) == (5, "enough")


def test_a_bound_in_updates_counts_the_bodys(tmp_path: Path):
    loop = make(tmp_path, max_epochs=None, max_updates=4, accumulate=2)
    train(loop)
    assert (loop.state.update, loop.state.iteration) == (4, 8)


def test_metrics_of_the_body_are_in_the_output(tmp_path: Path):
    loop = make(tmp_path)
    for _ in loop.batches():
        loop.output = {"loss": torch.tensor(2.0), "accuracy": 0.5}
    (last,) = EventLog(tmp_path).read(event="iteration_completed", iteration=(30, 30))
    assert last.output == {"loss": 2.0, "accuracy": 0.5}


@pytest.mark.parametrize("setting", [{"clip_grad_value": 2.0}, {"clip_grad_norm": 1.0}, {"precision": "bf16"}])
def test_settings_of_the_step_are_refused(setting: dict[str, Any], tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"TrainingConfig\(\w+=.*has no effect in a Loop") as raised:
        make(tmp_path, **setting)
    assert {raised.value.argument: raised.value.value} == setting


def test_a_by_value_backend_is_rejected_because_the_body_computes_in_place():
    with pytest.raises(ConfigurationError, match=r"Loop\(backend=FunctionalTorchBackend\).*use a Trainer"):
        Loop(regression_model(), loader(), strategy=SupervisedStrategy("mse"), backend=TorchBackend(functional=True))


def test_parameters_that_a_second_optimizer_of_the_body_trains_are_not_named_as_untrained():
    model = regression_model()
    model[0].requires_grad_(False)
    loop = Loop(model, loader(), config=TrainingConfig(max_epochs=2, log_every_n_steps=2))
    model[0].requires_grad_(True)
    second = torch.optim.SGD(model[0].parameters(), lr=0.01)
    before = model[0].weight.clone()
    with structlog.testing.capture_logs() as logs:
        for inputs, targets in loop.batches():
            loop.output = loss = nn.functional.mse_loss(loop.model(inputs), targets)
            loss.backward()
            for optimizer in (loop.optimizer, second):
                optimizer.step()
                optimizer.zero_grad()
    assert not torch.equal(model[0].weight, before)
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == []
