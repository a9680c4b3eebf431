"""Adam and AdamW as pure functions."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from pulsetrain.engine.optimizers.functional.rules import check, decayed, scaled
from pulsetrain.engine.optimizers.functional.trees import (
    DecayMask,
    OptimizerState,
    PyTree,
    Trees,
    new_state,
    open_trees,
)

__all__ = ["Adam", "AdamW"]

_AVERAGES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) with the numbers of torch.optim.Adam: eps is added to the corrected root.

    >>> import torch
    >>> optimizer, params = Adam(0.1), torch.tensor([1.0, 2.0])
    >>> updates, state = optimizer.update(torch.tensor([3.0, -0.5]), optimizer.init(params), params)
    >>> updates
    tensor([-0.1000,  0.1000])

    Args:
        learning_rate: the rate of a new state; `update` uses the state's.
        weight_decay: an L2 penalty, which enters the averages.
        decay_mask: which parameters decay; None means all.

    Raises:
        ConfigurationError: a value is out of range.
    """

    learning_rate: float
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_mask: DecayMask = None

    def __post_init__(self) -> None:
        options = {"betas": self.betas, "eps": self.eps}
        check("Adam", "adam", self.learning_rate, self.weight_decay, self.decay_mask, options)

    def init(self, params: PyTree) -> OptimizerState:
        return new_state("Adam.init", params, self.learning_rate, _AVERAGES, self.decay_mask)

    def update(self, grads: PyTree, opt_state: OptimizerState, params: PyTree) -> tuple[PyTree, OptimizerState]:
        trees = open_trees("Adam.update", grads, opt_state, params, _AVERAGES, self.decay_mask)
        updates, state = _moments(trees, decayed(trees, self.weight_decay), opt_state, self.betas, self.eps)
        return trees.whole(updates), state


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) with the numbers of torch.optim.AdamW: the decay bypasses the averages.

    >>> import torch
    >>> optimizer, params = AdamW(0.1, weight_decay=0.5), torch.tensor([1.0, 2.0])
    >>> updates, state = optimizer.update(torch.tensor([3.0, -0.5]), optimizer.init(params), params)
    >>> updates
    tensor([-1.5000e-01, -3.7253e-08])

    Args:
        learning_rate: the rate of a new state; `update` uses the state's.
        weight_decay: each update subtracts `learning_rate * weight_decay * param`; 0 by default, unlike torch's.
        decay_mask: which parameters decay; None means all.

    Raises:
        ConfigurationError: a value is out of range.
    """

    learning_rate: float
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_mask: DecayMask = None

    def __post_init__(self) -> None:
        options = {"betas": self.betas, "eps": self.eps}
        check("AdamW", "adamw", self.learning_rate, self.weight_decay, self.decay_mask, options)

    def init(self, params: PyTree) -> OptimizerState:
        return new_state("AdamW.init", params, self.learning_rate, _AVERAGES, self.decay_mask)

    def update(self, grads: PyTree, opt_state: OptimizerState, params: PyTree) -> tuple[PyTree, OptimizerState]:
        trees = open_trees("AdamW.update", grads, opt_state, params, _AVERAGES, self.decay_mask)
        updates, state = _moments(trees, trees.grads, opt_state, self.betas, self.eps)
        if self.weight_decay:
            # with the factor that torch multiplies by, so that float32 rounding gives the same bits
            remaining = 1 - opt_state["learning_rate"] * self.weight_decay
            updates = [
                scaled(param, remaining) - param + change if decays else change
                for change, param, decays in zip(updates, trees.params, trees.decays, strict=True)
            ]
        return trees.whole(updates), state


def _moments(
    trees: Trees, grads: list[Tensor], opt_state: OptimizerState, betas: tuple[float, float], eps: float
) -> tuple[list[Tensor], OptimizerState]:
    """Adam's updates and the next state."""
    beta1, beta2 = betas
    step = opt_state["step"] + 1
    step_size = opt_state["learning_rate"] / (1 - beta1**step)
    root_correction = (1 - beta2**step) ** 0.5
    means = [mean.lerp(grad, 1 - beta1) for mean, grad in zip(trees.averages["exp_avg"], grads, strict=True)]
    squares = [
        square.mul(beta2).addcmul(grad, grad, value=1 - beta2)
        for square, grad in zip(trees.averages["exp_avg_sq"], grads, strict=True)
    ]
    updates = [
        scaled(mean / (square.sqrt() / root_correction + eps), -step_size)
        for mean, square in zip(means, squares, strict=True)
    ]
    state = {**opt_state, "step": step, "exp_avg": trees.whole(means), "exp_avg_sq": trees.whole(squares)}
    return updates, state
