"""Runs with many kinds of models, optimizers, handlers, strategies and backends, whose checkpoints hold all their
state: no save, resume or verification reports any of it as unsaved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pulsetrain.engine import Every, JaxBackend, SupervisedStrategy, TorchBackend
from pulsetrain.engine.optimizers.registry import NAMES
from pulsetrain.handlers import EMA, SWA, BestModel, Callback, EarlyStopping, LossSpikeGuard, NaNGuard
from tests.integration import test_honest_runs_data
from tests.pulsetrain.training import test_several_optimizers as several
from tests.support import models_hugging_face, runs_strategies
from tests.support.cases import Cases, Make
from tests.support.models import pairs, regression_model
from tests.support.runs import guarded_data
from tests.support.runs_backends import needs_jax, nnx_model
from tests.support.runs_honest import BATCH, check_that_no_state_is_reported_as_unsaved

CASES = Cases()
case = CASES.add


# --------------------------------------------------------------------------------------------- models and averages


@case()
def averaged_weights() -> dict[str, Any]:
    return {"handlers": [EMA(decay=0.9)], "val_loader": DataLoader(pairs(8), BATCH)}


@case()
def weights_averaged_from_the_second_epoch_on() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return {"model": model, "handlers": [SWA(after_epoch=2)]}


@case()
def batch_norm_and_dropout() -> dict[str, Any]:
    return {"model": regression_model(dropout=0.3)}


class Attending(nn.Module):
    """Modules of torch that keep more than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8))
        self.recurrent, self.attention = nn.LSTM(8, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 1))
        self.last.bias = self.last.bias

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.normed(inputs)[:, None])
        return self.last(self.attention(hidden, hidden, hidden)[0][:, 0])


@case()
def modules_normalised_by_hooks_of_torchs() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of weight_norm, which torch deprecates
        first, last = nn.utils.spectral_norm(nn.Linear(4, 8)), nn.utils.weight_norm(nn.Linear(8, 1))
    return {"model": nn.Sequential(first, nn.ReLU(), last)}


@case()
def recurrent_attending_and_parametrized_modules() -> dict[str, Any]:
    return {"model": Attending(), "config": {"optimizer": "sgd"}}


@case()
def a_frozen_backbone_in_evaluation() -> dict[str, Any]:
    model = regression_model()
    model[:2].requires_grad_(False).eval()
    return {"model": model}


@case()
def two_modules_with_optimizers_of_their_own() -> dict[str, Any]:
    return {"model": several.modules(), "strategy": several.InTurns(), "config": {"optimizer": "adam"}}


@case(pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"))
def a_llama_with_adapters() -> dict[str, Any]:
    model = models_hugging_face.with_adapters(models_hugging_face.model_of("llama"))
    made = models_hugging_face.trainer_of("sft", model)
    return {"model": model, "train_loader": list(made.train_loader) * 6, "strategy": type(made.strategy)()}


# --------------------------------------------------------------------------------------------- optimizers and precision


def with_optimizer(name: str) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        pytest.importorskip({"lion": "lion_pytorch"}.get(name, "schedulefree" if "free" in name else "torch"))
        return {"config": {"optimizer": name, "schedule": None if "free" in name else "cosine", "accumulate": 2}}

    return make


CASES += [pytest.param(with_optimizer(name), id=f"the optimizer {name}") for name in NAMES]


@case()
def bf16() -> dict[str, Any]:
    return {"config": {"precision": "bf16"}}


@case()
def fp16() -> dict[str, Any]:
    return {"config": {"precision": "fp16"}}


@case(pytest.mark.slow)
def a_compiled_model() -> dict[str, Any]:
    return {"backend": TorchBackend(compile=True)}


@case(pytest.mark.slow)
def a_model_that_the_user_has_compiled() -> dict[str, Any]:
    model = regression_model()
    model.compile(backend="eager")
    return {"model": model}


# ------------------------------------------------------------------------------------------------ handlers and saves


@case()
def a_metric_of_torchmetrics_that_the_user_has_written() -> dict[str, Any]:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Total(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.total += (outputs - targets).abs().sum()

        def compute(self) -> Tensor:
            return self.total

    return {"metrics": {"total": Total()}, "val_loader": DataLoader(pairs(8), BATCH)}


@case()
def the_best_weights_kept() -> dict[str, Any]:
    return {"handlers": [BestModel()], "val_loader": DataLoader(pairs(8), BATCH)}


@case()
def a_guard_that_rewinds() -> dict[str, Any]:
    return {
        "train_loader": DataLoader(guarded_data((13,)), BATCH),
        "handlers": [NaNGuard("rewind", Every(iterations=3))],
        "every": Every(iterations=2),
    }


@case()
def a_guard_of_loss_spikes() -> dict[str, Any]:
    return {"handlers": [LossSpikeGuard()]}


@case()
def saves_in_the_background() -> dict[str, Any]:
    return {"background": True}


class Counting(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, trainer: Any, loss: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


@case()
def callbacks_with_a_state_early_stopping_and_metrics() -> dict[str, Any]:
    torchmetrics = pytest.importorskip("torchmetrics")
    return {
        "callbacks": [Counting()],
        "handlers": [EarlyStopping(patience=9)],
        "val_loader": DataLoader(pairs(8), BATCH),
        "metrics": {"error": torchmetrics.MeanSquaredError()},
    }


# ------------------------------------------------------------------------------------------- strategies and backends


def of_task(task: runs_strategies.Task, on: str) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        return {
            "model": task.jax_model() if on == runs_strategies.JAX else task.model(),
            "train_loader": task.data(),
            "strategy": task.strategy(),
            "backend": runs_strategies.MAKE_BACKEND[on](),
            "config": {**runs_strategies.SETTINGS, **task.settings, "max_epochs": 3},
        }

    return make


for on in (runs_strategies.TORCH, runs_strategies.FUNCTIONAL, runs_strategies.JAX):
    for task in runs_strategies.TASKS:
        made = runs_strategies.case(task, on)
        CASES.append(pytest.param(of_task(task, on), id=f"{task.name} on {on}", marks=[*made.marks, pytest.mark.slow]))


@case(needs_jax, pytest.mark.slow)
def a_module_of_flax() -> dict[str, Any]:
    return {"model": nnx_model(), "backend": JaxBackend()}


class Weighing(SupervisedStrategy):
    def __init__(self) -> None:
        import jax

        super().__init__("mse")
        self.weight, self.several = jax.numpy.ones(3), [jax.numpy.ones(3), jax.random.key(0)]

    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().compute_loss(outputs, batch) * float(self.weight[0])


@case(needs_jax)
def a_strategy_holds_arrays_of_jax() -> dict[str, Any]:
    return {"strategy": Weighing()}


@case()
def torch_functional() -> dict[str, Any]:
    return {"model": regression_model(dropout=0.3), "backend": TorchBackend(functional=True)}


# ------------------------------------------------------------------------------------------------------------- tests


def test_there_are_many_kinds_of_runs():
    assert len(test_honest_runs_data.CASES) + len(CASES) >= 33


@pytest.mark.parametrize("make", CASES)
@pytest.mark.slow
def test_no_state_is_reported_as_unsaved(make: Make, tmp_path: Path):
    check_that_no_state_is_reported_as_unsaved(make, tmp_path)
