"""RMSprop as a pure function."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from pulsetrain.engine.optimizers.functional.rules import check, decayed, scaled
from pulsetrain.engine.optimizers.functional.trees import DecayMask, OptimizerState, PyTree, new_state, open_trees

__all__ = ["RMSprop"]


@dataclass(frozen=True, slots=True)
class RMSprop:
    """RMSprop with the numbers of torch.optim.RMSprop.

    Averages start at 0, eps is added to the root, and momentum applies after the division.

    >>> import torch
    >>> optimizer, params = RMSprop(0.1, alpha=0.75), torch.tensor([1.0])
    >>> updates, state = optimizer.update(torch.tensor([2.0]), optimizer.init(params), params)
    >>> updates, state["square_avg"]
    (tensor([-0.2000]), tensor([1.]))

    Args:
        learning_rate: the rate of a new state; `update` uses the state's.
        centered: divide by the standard deviation of the gradients instead of their root mean square.
        weight_decay: an L2 penalty.
        decay_mask: which parameters decay; None means all.

    Raises:
        ConfigurationError: a value is out of range.
    """

    learning_rate: float
    _: KW_ONLY
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    weight_decay: float = 0.0
    decay_mask: DecayMask = None

    def __post_init__(self) -> None:
        options = {"alpha": self.alpha, "eps": self.eps, "momentum": self.momentum, "centered": self.centered}
        check("RMSprop", "rmsprop", self.learning_rate, self.weight_decay, self.decay_mask, options)

    def init(self, params: PyTree) -> OptimizerState:
        return new_state("RMSprop.init", params, self.learning_rate, self._averages(), self.decay_mask)

    def update(self, grads: PyTree, opt_state: OptimizerState, params: PyTree) -> tuple[PyTree, OptimizerState]:
        trees = open_trees("RMSprop.update", grads, opt_state, params, self._averages(), self.decay_mask)
        directions = decayed(trees, self.weight_decay)
        state = {**opt_state, "step": opt_state["step"] + 1}
        squares = [
            square.mul(self.alpha).addcmul(grad, grad, value=1 - self.alpha)
            for square, grad in zip(trees.averages["square_avg"], directions, strict=True)
        ]
        state["square_avg"] = trees.whole(squares)
        variances = squares
        if self.centered:
            means = [
                mean.lerp(grad, 1 - self.alpha)
                for mean, grad in zip(trees.averages["grad_avg"], directions, strict=True)
            ]
            state["grad_avg"] = trees.whole(means)
            variances = [square.addcmul(mean, mean, value=-1) for square, mean in zip(squares, means, strict=True)]
        directions = [grad / (variance.sqrt() + self.eps) for grad, variance in zip(directions, variances, strict=True)]
        if self.momentum:
            directions = [
                scaled(buffer, self.momentum) + direction
                for buffer, direction in zip(trees.averages["momentum_buffer"], directions, strict=True)
            ]
            state["momentum_buffer"] = trees.whole(directions)
        return trees.whole([scaled(direction, -opt_state["learning_rate"]) for direction in directions]), state

    def _averages(self) -> tuple[str, ...]:
        return (
            "square_avg",
            *(("grad_avg",) if self.centered else ()),
            *(("momentum_buffer",) if self.momentum else ()),
        )
