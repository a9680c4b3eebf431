"""RMSprop as a pure function."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor

from pulsetrain.engine.optimizers.functional.rules import FunctionalOptimizer, Step, decayed, scaled
from pulsetrain.engine.optimizers.functional.trees import DecayMask, Trees

__all__ = ["RMSprop"]


@dataclass(frozen=True, slots=True)
class RMSprop(FunctionalOptimizer):
    """RMSprop with the numbers of torch.optim.RMSprop.

    Averages start at 0, eps is added to the root, and momentum applies after the division.

    >>> import torch
    >>> optimizer, params = RMSprop(0.1, alpha=0.75), torch.tensor([1.0])
    >>> updates, state = optimizer.update(torch.tensor([2.0]), optimizer.init(params), params)
    >>> updates, state["square_avg"]
    (tensor([-0.2000]), tensor([1.]))

    Args:
        learning_rate: the rate of a new state; `update` uses the state's. A tensor of shape () gets a gradient.
        centered: divide by the standard deviation of the gradients instead of their root mean square.
        weight_decay: an L2 penalty.
        decay_mask: which parameters decay; None means all.

    Raises:
        ConfigurationError: a value is out of range.
    """

    learning_rate: float | Tensor
    _: KW_ONLY
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    weight_decay: float = 0.0
    decay_mask: DecayMask = None
    kind: ClassVar[str] = "rmsprop"
    options: ClassVar[tuple[str, ...]] = ("alpha", "eps", "momentum", "centered")

    @property
    def _averages(self) -> tuple[str, ...]:
        names = {"square_avg": True, "grad_avg": self.centered, "momentum_buffer": self.momentum}
        return tuple(name for name, kept in names.items() if kept)

    def _step(self, trees: Trees, step: int, rate: float | Tensor) -> Step:
        directions = decayed(trees, self.weight_decay)
        variances = squares = [
            square.mul(self.alpha).addcmul(grad, grad, value=1 - self.alpha)
            for square, grad in zip(trees.averages["square_avg"], directions, strict=True)
        ]
        averages = {"square_avg": squares}
        if self.centered:
            means = averages["grad_avg"] = [
                mean.lerp(grad, 1 - self.alpha)
                for mean, grad in zip(trees.averages["grad_avg"], directions, strict=True)
            ]
            variances = [square.addcmul(mean, mean, value=-1) for square, mean in zip(squares, means, strict=True)]
        directions = [grad / (variance.sqrt() + self.eps) for grad, variance in zip(directions, variances, strict=True)]
        if self.momentum:
            directions = averages["momentum_buffer"] = [
                scaled(buffer, self.momentum) + direction
                for buffer, direction in zip(trees.averages["momentum_buffer"], directions, strict=True)
            ]
        return [scaled(direction, -rate) for direction in directions], averages
