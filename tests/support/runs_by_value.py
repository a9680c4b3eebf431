"""The same small run on each backend that computes by value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import JaxBackend, SupervisedStrategy, TorchBackend
from tests.plugins.numpy_backend import Linear, NumpyBackend
from tests.support.models import batches, bits, linen_model, torch_model
from tests.support.runs_backends import needs_jax

SETTINGS = {
    "max_epochs": 3,
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "log_every_n_steps": 5,
    "seed": 0,
    "device": "cpu",
}


def _linear_model(weights: Any) -> Linear:
    return Linear(weights["0.weight"][:3].numpy(), weights["2.bias"].numpy())


def torch_norm_model(weights: Any) -> nn.Module:
    model = nn.Sequential(*torch_model()[:2], nn.BatchNorm1d(8), torch_model()[2])
    model.load_state_dict(
        {f"{3 if name[0] == '2' else 0}{name[1:]}": each for name, each in weights.items()}, strict=False
    )
    return model


MAKE = {
    "torch": (lambda: TorchBackend(functional=True), torch_norm_model),
    "jax": (JaxBackend, lambda weights: linen_model(weights, 0.3, norm=True)),
    "numpy": (NumpyBackend, _linear_model),
}
ALL = ["torch", pytest.param("jax", marks=needs_jax), "numpy"]
each_backend = pytest.mark.parametrize("on", ALL)


def trainer(
    on: str,
    handlers: Iterable[Any] = (),
    data: Any = None,
    *,
    backend: Any = None,
    strategy: Any = None,
    optimizer_object: Any = None,
    **settings: Any,
) -> Trainer:
    """Always the same run: three epochs of ten batches, each with a validation."""
    make_backend, model = MAKE[on]
    return Trainer(
        model(torch_model().state_dict()),
        batches(10) if data is None else data,
        batches(3),
        strategy=strategy or SupervisedStrategy(),
        optimizer=optimizer_object,
        backend=backend or make_backend(),
        config=TrainingConfig(**{**SETTINGS, **settings}),
        handlers=list(handlers),
    )


def state_of(run: Trainer) -> dict[str, Any]:
    """Weights and optimizer state, as bits."""
    return bits(run.backend, run.model_state)
