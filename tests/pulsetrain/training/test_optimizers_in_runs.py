"""Unusual optimizers in a run: exact resume, and validation on the averaged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from pulsetrain import Trainer
from pulsetrain.engine import Events, Every
from pulsetrain.engine.optimizers import averaged_weights
from pulsetrain.handlers import Checkpointer
from tests.support.models import loader, regression_model, trainer

NAMES = ["muon", "lion", "schedule_free_adamw", "schedule_free_sgd", "nadam", "adagrad"]


def make(folder: Path, name: str) -> Trainer:
    config = {
        "optimizer": name,
        "max_epochs": 3,
        "accumulate": 2,
        "learning_rate": 0.003,
        "schedule": "cosine",
        "optimizer_options": {"layer_rates": {"4": 0.001}},
    }
    return trainer(
        config,
        model=regression_model(dropout=0.2),
        val_loader=loader(12, shuffle=False),
        handlers=[Checkpointer(folder, every=Every(iterations=1), keep_last=100)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_cut_off_and_resumed_equals_the_uninterrupted_one(name: str, tmp_path: Path):
    whole = make(tmp_path / "whole", name)
    history = whole.train()
    cut = make(tmp_path / "cut", name)

    @cut.on(Events.ITERATION_COMPLETED(once=13), phase=3)
    def pull() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cut.train()
    again = make(tmp_path / "cut", name)
    assert again.train(resume="latest") == history
    for key, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[key], value), key


@pytest.mark.parametrize("name", NAMES)
def test_validating_changes_no_weight(name: str, tmp_path: Path):
    often = trainer({"optimizer": name, "max_epochs": 2, "validate_every": Every(iterations=3)}, val_loader=loader(8))
    never = trainer({"optimizer": name, "max_epochs": 2, "validate_every": None}, val_loader=loader(8))
    often.train()
    never.train()
    for key, value in never.model.state_dict().items():
        assert torch.equal(often.model.state_dict()[key], value), key


@pytest.mark.parametrize("name", ["schedule_free_adamw", "schedule_free_sgd"])
def test_validation_sees_the_averaged_weights_of_a_schedule_free_optimizer(name: str):
    run = trainer({"optimizer": name, "max_epochs": 2, "learning_rate": 0.05}, val_loader=loader(12, shuffle=False))
    run.train()
    inputs, targets = (torch.cat(parts) for parts in zip(*loader(12, shuffle=False), strict=True))

    def loss() -> float:
        run.model.eval()
        with torch.no_grad():
            value = torch.nn.functional.mse_loss(run.model(inputs), targets).item()
        run.model.train()
        return value

    raw = loss()
    with averaged_weights(run.optimizer):
        averaged = loss()
    assert run.history["val/loss"][-1] == pytest.approx(averaged, rel=1e-5)
    assert raw != pytest.approx(averaged, rel=1e-3)
    assert run.evaluator.run(loader(12, shuffle=False)).metrics["loss"] == pytest.approx(averaged, rel=1e-5)
    assert loss() == raw


def unfreezing(frozen_first: bool, add: bool = False, **settings: Any) -> Trainer:
    """A run whose handler unfreezes the first layer at the start of its second epoch."""
    model = regression_model()
    if frozen_first:
        model[0].requires_grad_(False)
    run = trainer({"max_epochs": 3, **settings}, model=model)
    model[0].requires_grad_(False)

    @run.on(Events.EPOCH_STARTED(once=2))
    def unfreeze() -> None:
        model[0].requires_grad_(True)
        if add:
            run.optimizer.add_param_group({"params": list(model[0].parameters())})

    return run


def warnings_of(run: Trainer) -> list[Any]:
    with structlog.testing.capture_logs() as logs:
        run.train()
    return [entry for entry in logs if entry["log_level"] == "warning"]


@pytest.mark.parametrize("settings", [{}, {"log_every_n_steps": 1000}], ids=["log points", "the run's end"])
def test_a_parameter_that_was_frozen_when_the_trainer_was_made_is_named_when_it_should_train(settings: dict[str, int]):
    run = unfreezing(frozen_first=True, **settings)
    before = run.model[0].weight.clone()
    warnings = warnings_of(run)
    assert torch.equal(run.model[0].weight, before)
    assert [(each["first"], each["parameters"]) for each in warnings] == [("0.weight", 2)]
    assert "in no group of the optimizer" in warnings[0]["event"]
    assert "freeze parameters after the Trainer is made" in warnings[0]["event"]


@pytest.mark.parametrize(("frozen_first", "add"), [(False, False), (True, True)])
def test_a_parameter_that_is_frozen_later_or_added_to_the_optimizer_trains(frozen_first: bool, add: bool):
    run = unfreezing(frozen_first, add)
    before = run.model[0].weight.clone()
    assert warnings_of(run) == []
    assert not torch.equal(run.model[0].weight, before)


def test_a_parameter_that_stays_frozen_is_not_named():
    model = regression_model()
    model[0].requires_grad_(False)
    assert warnings_of(trainer({"max_epochs": 2}, model=model)) == []
