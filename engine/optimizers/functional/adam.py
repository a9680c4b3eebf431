"""Adam and AdamW as pure functions."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor

from pulsetrain.engine.optimizers.functional.rules import FunctionalOptimizer, Step, decayed, scaled
from pulsetrain.engine.optimizers.functional.trees import DecayMask, Trees

__all__ = ["Adam", "AdamW"]


@dataclass(frozen=True, slots=True)
class _Moments(FunctionalOptimizer):
    """Averages of the gradients and of their squares."""

    learning_rate: float | Tensor
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_mask: DecayMask = None
    options: ClassVar[tuple[str, ...]] = ("betas", "eps")

    @property
    def _averages(self) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def _moments(self, trees: Trees, grads: list[Tensor], step: int, rate: float | Tensor) -> Step:
        """Adam's updates and averages."""
        beta1, beta2 = self.betas
        step_size = rate / (1 - beta1 ** (step + 1))
        root_correction = (1 - beta2 ** (step + 1)) ** 0.5
        means = [mean.lerp(grad, 1 - beta1) for mean, grad in zip(trees.averages["exp_avg"], grads, strict=True)]
        squares = [
            square.mul(beta2).addcmul(grad, grad, value=1 - beta2)
            for square, grad in zip(trees.averages["exp_avg_sq"], grads, strict=True)
        ]
        updates = [
            scaled(mean / (square.sqrt() / root_correction + self.eps), -step_size)
            for mean, square in zip(means, squares, strict=True)
        ]
        return updates, {"exp_avg": means, "exp_avg_sq": squares}


@dataclass(frozen=True, slots=True)
class Adam(_Moments):
    """Adam (Kingma and Ba 2015, algorithm 1) with the numbers of torch.optim.Adam: eps is added to the corrected root.

    >>> import torch
    >>> optimizer, params = Adam(0.1), torch.tensor([1.0, 2.0])
    >>> updates, state = optimizer.update(torch.tensor([3.0, -0.5]), optimizer.init(params), params)
    >>> updates
    tensor([-0.1000,  0.1000])

    Args:
        learning_rate: the rate of a new state; `update` uses the state's. A tensor of shape () gets a gradient.
        weight_decay: an L2 penalty, which enters the averages.
        decay_mask: which parameters decay; None means all.

    Raises:
        ConfigurationError: a value is out of range.
    """

    kind: ClassVar[str] = "adam"

    def _step(self, trees: Trees, step: int, rate: float | Tensor) -> Step:
        return self._moments(trees, decayed(trees, self.weight_decay), step, rate)


@dataclass(frozen=True, slots=True)
class AdamW(_Moments):
    """AdamW (Loshchilov and Hutter 2019) with the numbers of torch.optim.AdamW: the decay bypasses the averages.

    >>> import torch
    >>> optimizer, params = AdamW(0.1, weight_decay=0.5), torch.tensor([1.0, 2.0])
    >>> updates, state = optimizer.update(torch.tensor([3.0, -0.5]), optimizer.init(params), params)
    >>> updates
    tensor([-1.5000e-01, -3.7253e-08])

    Args:
        learning_rate: the rate of a new state; `update` uses the state's. A tensor of shape () gets a gradient.
        weight_decay: each update subtracts `learning_rate * weight_decay * param`; 0 by default, unlike torch's.
        decay_mask: which parameters decay; None means all.

    Raises:
        ConfigurationError: a value is out of range.
    """

    kind: ClassVar[str] = "adamw"

    def _step(self, trees: Trees, step: int, rate: float | Tensor) -> Step:
        updates, averages = self._moments(trees, trees.grads, step, rate)
        if self.weight_decay:
            # with the factor that torch multiplies by, so that float32 rounding gives the same bits
            remaining = 1 - rate * self.weight_decay
            updates = [
                scaled(param, remaining) - param + change if decays else change
                for change, param, decays in zip(updates, trees.params, trees.decays, strict=True)
            ]
        return updates, averages
