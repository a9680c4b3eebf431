"""A backend in NumPy, like one of a plug-in: a linear model with hand-written gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pulsetrain.engine.backends.functional import FunctionalBackend
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.protocols import TrainingBatch, TrainingStrategy

__all__ = ["Linear", "NumpyBackend", "NumpySGD"]

Arrays = Mapping[str, Any]


class Linear(NamedTuple):
    """outputs = inputs @ weight.T + bias.

    Args:
        weight: shape (outputs, inputs).
        bias: shape (outputs,).
    """

    weight: Any
    bias: Any


class NumpySGD:
    """buffer = momentum * buffer + gradient; parameters - learning_rate * buffer."""

    def __init__(self, learning_rate: float, momentum: float = 0.9) -> None:
        self.learning_rate, self.momentum = learning_rate, momentum

    def init(self, params: Arrays) -> dict[str, Any]:
        zeros = {name: np.zeros_like(array) for name, array in params.items()}
        return {"learning_rate": self.learning_rate, "momentum_buffer": zeros}

    def update(self, grads: Arrays, opt_state: Arrays, params: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
        rate, old = opt_state["learning_rate"], opt_state["momentum_buffer"]
        buffers = {name: self.momentum * old[name] + gradient for name, gradient in grads.items()}
        return {name: -rate * each for name, each in buffers.items()}, {**opt_state, "momentum_buffer": buffers}


class NumpyBackend(FunctionalBackend):
    """Linear regression and softmax regression on the host."""

    def split(self, model: Any) -> dict[str, Any]:
        if not isinstance(model, Linear):
            raise TypeError(f"NumpyBackend: model={type(model).__name__}: needs a Linear(weight, bias)")
        return {"parameters": {name: np.array(array) for name, array in model._asdict().items()}, "buffers": {}}

    def loss_and_gradients(
        self, weights: Arrays, batch: TrainingBatch, strategy: TrainingStrategy, draw: tuple[int, int]
    ) -> tuple[Any, Any, Any]:
        outputs, loss = self.evaluate(weights, batch, strategy)
        error = _of_loss(strategy, outputs, batch.targets)
        return loss, {"weight": error.T @ batch.inputs, "bias": error.sum(0)}, weights["buffers"]

    def evaluate(self, weights: Arrays, batch: TrainingBatch, strategy: TrainingStrategy) -> tuple[Any, Any]:
        outputs = _forward(weights, batch.inputs)
        return outputs, strategy.compute_loss(outputs, batch)

    def create_optimizer(self, model: Any, name: str, learning_rate: float, weight_decay: float, **options: Any) -> Any:
        if name != "sgd" or weight_decay:
            raise ConfigurationError(f"NumpyBackend: knows sgd without weight decay, not {name!r}; pass an optimizer")
        return NumpySGD(learning_rate, **options)

    def outputs(self, weights: Arrays, inputs: tuple[Any, ...]) -> Any:
        return self.to_torch(_forward(weights, *self.to_native(inputs)))


def _forward(weights: Arrays, inputs: Any) -> Any:
    return inputs @ weights["parameters"]["weight"].T + weights["parameters"]["bias"]


def _of_loss(strategy: Any, outputs: Any, targets: Any) -> Any:
    """The mean loss's gradient with respect to the outputs, which have its shape."""
    if strategy.loss_name == "mse":
        return 2 * (outputs - targets) / outputs.size
    if strategy.loss_name == "cross_entropy":
        powers = np.exp(outputs - outputs.max(-1, keepdims=True))
        chosen = np.eye(outputs.shape[-1], dtype=outputs.dtype)[targets]
        return (powers / powers.sum(-1, keepdims=True) - chosen) / len(outputs)
    raise ConfigurationError(f"NumpyBackend: has no gradient of {strategy.loss_name!r}; mse and cross_entropy")
