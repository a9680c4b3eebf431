"""Strategies that differentiate with respect to inputs are validated as others are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import (
    ConfigurationError,
    Events,
    SupervisedStrategy,
    Topology,
    TorchBackend,
    TrainerCore,
    TrainingBatch,
)
from tests.support.ranks import in_processes


class Slope:
    """The loss is the square of the outputs' slope, and so is a metric."""

    needs_gradients = True

    def prepare_batch(self, batch: Tensor) -> TrainingBatch:
        return TrainingBatch(batch.clone().requires_grad_(), None, samples=len(batch))

    def compute_loss(self, outputs: Any, batch: TrainingBatch) -> Tensor:
        return self.slope(outputs, batch)

    def compute_metrics(self, outputs: Any, batch: TrainingBatch) -> dict[str, Tensor]:
        return {"slope": self.slope(outputs, batch)}

    def slope(self, outputs: Tensor, batch: TrainingBatch) -> Tensor:
        (found,) = torch.autograd.grad(outputs.sum(), batch.inputs, create_graph=True)
        return found.square().mean()


class Without(Slope):
    needs_gradients = False


POINTS = [torch.linspace(-1, 1, 6)[:, None], torch.linspace(0, 2, 6)[:, None]]


def trainer(strategy: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))
    config = TrainingConfig(max_epochs=3, optimizer="sgd", learning_rate=0.1, device="cpu")
    return Trainer(model, POINTS, POINTS, strategy=strategy, config=config)


def test_the_loss_of_a_validation_is_the_derivative_in_eval_mode() -> None:
    run = trainer(Slope())
    outputs: list[Any] = []
    run.evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: outputs.append(engine.state.output))
    history = run.train()
    expected = []
    for points in POINTS:
        points = points.clone().requires_grad_()
        (slope,) = torch.autograd.grad(run.model.eval()(points).sum(), points)
        expected.append(slope.square().mean().item())
    assert history["val/loss"][-1] == pytest.approx(sum(expected) / 2, rel=1e-5)
    assert history["val/slope"] == pytest.approx(history["val/loss"], rel=1e-6)
    assert len(outputs) == 6
    for each in outputs:  # no graph stays with what handlers and metrics see
        assert not each["loss"].requires_grad
        assert each["y_pred"] is None or not each["y_pred"].requires_grad
    assert all(each.grad is None for each in run.model.parameters())


def test_without_the_attribute_validation_records_nothing() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        trainer(Without()).train()


def test_others_are_validated_without_gradients() -> None:
    modes: list[bool] = []

    class Watching(SupervisedStrategy):
        def compute_metrics(self, outputs: Any, batch: TrainingBatch) -> dict[str, Tensor]:
            modes.append(torch.is_grad_enabled())
            return {}

    data = [(torch.ones(2, 1), torch.ones(2, 1))]
    config = TrainingConfig(max_epochs=1, device="cpu")
    Trainer(nn.Linear(1, 1), data, data, strategy=Watching("mse"), config=config).train()
    assert set(modes) == {False}


def test_a_pure_evaluation_is_differentiable() -> None:
    class Differentiable(SupervisedStrategy):
        needs_gradients = True

    core = TrainerCore(TorchBackend("cpu", functional=True), Differentiable("mse"), check=False)
    state = core.init(nn.Linear(1, 1, bias=False), "sgd", learning_rate=0.1)
    batch = torch.ones(2, 1), torch.zeros(2, 1)

    def loss(weight: Tensor) -> Tensor:
        weights = {**state.weights, "parameters": {"weight": weight}}
        return core.eval_step(batch, replace(state, weights=weights))["loss"]

    slope = torch.func.grad(loss)(torch.full((1, 1), 3.0))
    torch.testing.assert_close(slope, torch.full((1, 1), 6.0))


def test_a_pipeline_whose_outputs_have_no_gradient_refuses_it() -> None:
    def refused(rank: int) -> str:
        backend = TorchBackend("cpu", topology=Topology(pipeline=2))
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        with pytest.raises(ConfigurationError) as error:
            Trainer(model, POINTS, strategy=Slope(), backend=backend, config=TrainingConfig(max_epochs=1))
        return str(error.value)

    for each in in_processes(refused):
        assert not each.error, each.error
        assert "TorchBackend(strategy=Slope): is not known to work with a sharded model" in each.value
