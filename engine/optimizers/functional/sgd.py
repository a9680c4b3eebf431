"""Stochastic gradient descent with momentum, as a pure function."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers.functional.rules import check, decayed, scaled
from pulsetrain.engine.optimizers.functional.trees import DecayMask, OptimizerState, new_state, open_trees

__all__ = ["SGD"]


@dataclass(frozen=True, slots=True)
class SGD:
    """torch.optim.SGD's numbers: buffer = momentum * buffer + (1 - dampening) * grad, the first buffer the gradient.

    Args:
        learning_rate: of a new state; `update` goes by the state's.
        weight_decay: as an L2 penalty.
        decay_mask: which parameters decay; None for all.

    Raises:
        ConfigurationError: a value out of range.
    """

    learning_rate: float
    _: KW_ONLY
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_mask: DecayMask = None

    def __post_init__(self) -> None:
        options = {"momentum": self.momentum, "dampening": self.dampening, "nesterov": self.nesterov}
        check("SGD", "sgd", self.learning_rate, self.weight_decay, self.decay_mask, options)
        if self.nesterov and (not self.momentum or self.dampening):
            raise ConfigurationError(
                f"SGD(nesterov=True, momentum={self.momentum}, dampening={self.dampening}): "
                "needs a momentum above 0, and dampening=0"
            )

    def init(self, params: Any) -> OptimizerState:
        return new_state("SGD.init", params, self.learning_rate, self._averages(), self.decay_mask)

    def update(self, grads: Any, opt_state: OptimizerState, params: Any) -> tuple[Any, OptimizerState]:
        trees = open_trees("SGD.update", grads, opt_state, params, self._averages(), self.decay_mask)
        step, rate = opt_state["step"], opt_state["learning_rate"]
        directions = decayed(trees, self.weight_decay)
        state = {**opt_state, "step": step + 1}
        if self.momentum:
            share = 1 - self.dampening * (step > 0)
            buffers = [
                scaled(buffer, self.momentum) + scaled(grad, share)
                for buffer, grad in zip(trees.averages["momentum_buffer"], directions, strict=True)
            ]
            state["momentum_buffer"] = trees.whole(buffers)
            if self.nesterov:
                directions = [
                    grad.add(buffer, alpha=self.momentum) for grad, buffer in zip(directions, buffers, strict=True)
                ]
            else:
                directions = buffers
        return trees.whole([scaled(direction, -rate) for direction in directions]), state

    def _averages(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()
