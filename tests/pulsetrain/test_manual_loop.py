"""A manual loop has the events, the recording and the exact resume of a Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn

from pulsetrain import Loop, TrainingConfig
from pulsetrain.engine import ConfigurationError, Events, Every, SupervisedStrategy, TorchBackend
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import EMA, Checkpointer, CSVLogger, EventRecorder, NaNGuard
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


OPTIMIZERS = {
    "adamw": lambda each: torch.optim.AdamW(each, lr=0.1, weight_decay=0.5),
    "fused adamw": lambda each: torch.optim.AdamW(each, lr=0.1, weight_decay=0.5, fused=True),
    "sgd": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9, weight_decay=0.5),
    "adafactor": lambda each: torch.optim.Adafactor(each, lr=0.1, weight_decay=0.5),
}


def step_on(loop: Loop, inputs: torch.Tensor) -> None:
    loop.output = loss = loop.model(inputs).square().mean()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_guarded_update_that_is_not_finite_changes_neither_the_weights_nor_the_optimizer(name: str):
    model, guard = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), NaNGuard()
    ones, bad = torch.rand(4, 2), torch.full((4, 2), torch.nan)
    loop = Loop(
        model,
        [ones, bad, ones],
        optimizer=OPTIMIZERS[name](model.parameters()),
        handlers=[guard],
        config=TrainingConfig(max_epochs=1, seed=0),
    )
    states = []
    for inputs in loop.batches():
        step_on(loop, inputs)
        states.append(copy.deepcopy((model[0].state_dict(), model[2].state_dict(), loop.optimizer.state_dict())))
        states[-1] += (model[1].running_mean.clone(), model[1].running_var.clone())
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert not torch.equal(states[2][0]["weight"], states[1][0]["weight"])
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert (guard.skipped, loop.state.update) == (1, 3)


def test_a_handler_of_the_users_skips_an_update_of_the_body():
    model = nn.Linear(2, 1)
    loop = Loop(model, [torch.ones(4, 2)] * 4, optimizer="sgd", config=TrainingConfig(max_epochs=1, seed=0))
    loop.add_event_handler(Events.GRADIENTS_READY(once=2), lambda: loop.skip_update(torch.tensor(True)))
    loop.add_event_handler(Events.GRADIENTS_READY(once=3), lambda: loop.skip_update(torch.tensor(False)))
    changed, before = [], model.weight.clone()
    for inputs in loop.batches():
        step_on(loop, inputs)
        changed.append(not torch.equal(model.weight, before))
        before = model.weight.clone()
    assert changed == [True, False, True, True]


def test_skipping_a_step_with_a_closure_is_refused():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    loop = Loop(model, [torch.ones(4, 2)] * 2, optimizer=optimizer, config=TrainingConfig(max_epochs=1, seed=0))
    loop.add_event_handler(Events.GRADIENTS_READY, lambda: loop.skip_update(torch.tensor(True)))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(loop.state.batch).square().mean()
        loss.backward()
        return loss

    next(batches := loop.batches())
    with pytest.raises(ConfigurationError, match=r"Loop\.skip_update\(optimizer=LBFGS\): cannot skip a step with a"):
        loop.optimizer.step(closure)
    batches.close()


def test_a_rewind_continues_after_the_checkpoint_and_leaves_the_batches_out(tmp_path: Path):
    def make_run(folder: Path, data: list[torch.Tensor], **config: Any) -> Loop:
        torch.manual_seed(0)
        handlers = [
            Checkpointer(folder, every=Every(iterations=1), keep_last=20),
            EventRecorder(folder),
            NaNGuard("rewind", every=Every(iterations=2)),
        ]
        settings = TrainingConfig(max_epochs=2, seed=0, **config)
        return Loop(nn.Linear(2, 1), data, optimizer="adamw", handlers=handlers, config=settings)

    data = [torch.full((4, 2), float(number)) for number in range(1, 7)]
    bad = [*data[:3], torch.full((4, 2), torch.nan), *data[4:]]
    whole = make_run(tmp_path / "whole", data, skip_batches=[(4, 4), (10, 10)])
    rewound = make_run(tmp_path / "rewound", bad)
    for loop in (whole, rewound):
        for inputs in loop.batches():
            step_on(loop, inputs)
    assert (whole.rewinds, rewound.rewinds) == (0, 2)
    assert (rewound.state.epoch, rewound.state.iteration) == (2, 12)
    assert torch.equal(whole.model.weight, rewound.model.weight)
    assert list(make_run(tmp_path / "rewound", bad).batches("latest")) == []  # the run has released its folder
