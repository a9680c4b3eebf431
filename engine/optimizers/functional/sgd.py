"""Stochastic gradient descent with momentum as a pure function."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor

from pulsetrain.engine.errors import refused
from pulsetrain.engine.optimizers.functional.rules import FunctionalOptimizer, Step, decayed, scaled
from pulsetrain.engine.optimizers.functional.trees import DecayMask, Trees

__all__ = ["SGD"]


@dataclass(frozen=True, slots=True)
class SGD(FunctionalOptimizer):
    """SGD with the numbers of torch.optim.SGD: `buffer = momentum * buffer + (1 - dampening) * grad`.

    The first buffer is the gradient.

    >>> import torch
    >>> optimizer, params = SGD(0.1, momentum=0.9), torch.tensor([1.0])
    >>> updates, state = optimizer.update(torch.tensor([1.0]), optimizer.init(params), params)
    >>> updates, state = optimizer.update(torch.tensor([1.0]), state, params)
    >>> updates, state["momentum_buffer"]
    (tensor([-0.1900]), tensor([1.9000]))

    Args:
        learning_rate: the rate of a new state; `update` uses the state's. A tensor of shape () gets a gradient.
        weight_decay: an L2 penalty.
        decay_mask: which parameters decay; None means all.

    Raises:
        ConfigurationError: a value is out of range.
    """

    learning_rate: float | Tensor
    _: KW_ONLY
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_mask: DecayMask = None
    kind: ClassVar[str] = "sgd"
    options: ClassVar[tuple[str, ...]] = ("momentum", "dampening", "nesterov")

    def __post_init__(self) -> None:
        FunctionalOptimizer.__post_init__(self)  # super() does not work in a dataclass with slots
        if self.nesterov and (not self.momentum or self.dampening):
            raise refused(self, "needs a momentum above 0, and dampening=0", "nesterov", "momentum", "dampening")

    @property
    def _averages(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def _step(self, trees: Trees, step: int, rate: float | Tensor) -> Step:
        directions, averages = decayed(trees, self.weight_decay), {}
        if self.momentum:
            share = 1 - self.dampening * (step > 0)
            buffers = averages["momentum_buffer"] = [
                scaled(buffer, self.momentum) + scaled(grad, share)
                for buffer, grad in zip(trees.averages["momentum_buffer"], directions, strict=True)
            ]
            if self.nesterov:
                directions = [
                    grad.add(buffer, alpha=self.momentum) for grad, buffer in zip(directions, buffers, strict=True)
                ]
            else:
                directions = buffers
        return [scaled(direction, -rate) for direction in directions], averages
