"""RMSprop, as a pure function."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from pulsetrain.engine.optimizers.functional.rules import check, decayed, scaled
from pulsetrain.engine.optimizers.functional.trees import DecayMask, OptimizerState, new_state, open_trees

__all__ = ["RMSprop"]


@dataclass(frozen=True, slots=True)
class RMSprop:
    """torch.optim.RMSprop's numbers: averages begin at 0, eps is beside the root, and momentum behind the division.

    Args:
        learning_rate: of a new state; `update` goes by the state's.
        centered: divide by the deviation of the gradients instead of their root mean square.
        weight_decay: as an L2 penalty.
        decay_mask: which parameters decay; None for all.

    Raises:
        ConfigurationError: a value out of range.
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

    def init(self, params: Any) -> OptimizerState:
        return new_state("RMSprop.init", params, self.learning_rate, self._averages(), self.decay_mask)

    def update(self, grads: Any, opt_state: OptimizerState, params: Any) -> tuple[Any, OptimizerState]:
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
