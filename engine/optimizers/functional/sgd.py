"""Stochastic gradient descent with momentum as a pure function."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers.functional.rules import check, decayed, scaled
from pulsetrain.engine.optimizers.functional.trees import DecayMask, OptimizerState, PyTree, new_state, open_trees

__all__ = ["SGD"]


@dataclass(frozen=True, slots=True)
class SGD:
    """SGD with the numbers of torch.optim.SGD: `buffer = momentum * buffer + (1 - dampening) * grad`.

    The first buffer is the gradient.

    >>> import torch
    >>> optimizer, params = SGD(0.1, momentum=0.9), torch.tensor([1.0])
    >>> updates, state = optimizer.update(torch.tensor([1.0]), optimizer.init(params), params)
    >>> updates, state = optimizer.update(torch.tensor([1.0]), state, params)
    >>> updates, state["momentum_buffer"]
    (tensor([-0.1900]), tensor([1.9000]))

    Args:
        learning_rate: the rate of a new state; `update` uses the state's.
        weight_decay: an L2 penalty.
        decay_mask: which parameters decay; None means all.

    Raises:
        ConfigurationError: a value is out of range.
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

    def init(self, params: PyTree) -> OptimizerState:
        return new_state("SGD.init", params, self.learning_rate, self._averages(), self.decay_mask)

    def update(self, grads: PyTree, opt_state: OptimizerState, params: PyTree) -> tuple[PyTree, OptimizerState]:
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
