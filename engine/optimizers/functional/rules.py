"""What the functional optimizers share: fields, checks, the state, and the form of an update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers.functional.trees import (
    DecayMask,
    OptimizerState,
    PyTree,
    Trees,
    new_state,
    open_trees,
)
from pulsetrain.engine.optimizers.options import check_rates, checked_options

__all__ = ["FunctionalOptimizer", "Step", "check", "decayed", "scaled"]

Step = tuple[list[Tensor], dict[str, list[Tensor]]]
"""The updates, and the averages after them."""


class FunctionalOptimizer:
    """Base class of the functional optimizers, frozen dataclasses, which add `_averages` and `_step`."""

    __slots__ = ()
    learning_rate: float | Tensor
    weight_decay: float
    decay_mask: DecayMask
    kind: ClassVar[str]
    """Its name in `create_optimizer`."""
    options: ClassVar[tuple[str, ...]]
    """The names of its options there."""

    def __post_init__(self) -> None:
        options = {name: getattr(self, name) for name in self.options}
        check(type(self).__name__, self.kind, self.learning_rate, self.weight_decay, self.decay_mask, options)

    @property
    def _averages(self) -> tuple[str, ...]:
        """The names of the trees in its state."""
        raise NotImplementedError

    def _step(self, trees: Trees, step: int, rate: float | Tensor) -> Step:
        """The updates with this rate after so many others, and the averages after them."""
        raise NotImplementedError

    def init(self, params: PyTree) -> OptimizerState:
        """The state of the first update of these parameters."""
        return new_state(f"{type(self).__name__}.init", params, self.learning_rate, self._averages, self.decay_mask)

    def update(self, grads: PyTree, opt_state: OptimizerState, params: PyTree) -> tuple[PyTree, OptimizerState]:
        """What is to be added to the parameters, and the next state."""
        place = f"{type(self).__name__}.update"
        trees = open_trees(place, grads, opt_state, params, self._averages, self.decay_mask)
        updates, averages = self._step(trees, opt_state["step"], opt_state["learning_rate"])
        kept = {name: trees.whole(leaves) for name, leaves in averages.items()}
        return trees.whole(updates), {**opt_state, "step": opt_state["step"] + 1, **kept}


def check(
    place: str,
    name: str,
    rate: float | Tensor,
    weight_decay: float,
    decay_mask: DecayMask,
    options: Mapping[str, object],
) -> dict[str, Any]:
    """The options under torch's names, checked by the rules of `create_optimizer`.

    Raises:
        ConfigurationError: a keyword is unknown, or a value is out of range.
    """
    checked = checked_options(name, options, place)
    if isinstance(rate, Tensor):
        if rate.ndim or not rate.is_floating_point():
            raise ConfigurationError(
                "needs a number, or a floating-point tensor of shape ()", place, learning_rate=rate
            )
        rate = 1.0  # its value is not read: that may wait for a device, and inside torch.func it cannot be read
    check_rates(rate, weight_decay, place)
    if isinstance(decay_mask, (bool, str)):
        raise ConfigurationError(
            "needs a pytree of bools like the parameters, a function from them to one, or None to decay all",
            place,
            decay_mask=decay_mask,
        )
    return checked


def scaled(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """The product in the tensor's own dtype; a learning rate that is a tensor would widen tensors of shape ()."""
    return (tensor * factor).to(tensor.dtype)


def decayed(trees: Trees, weight_decay: float) -> list[Tensor]:
    """The gradients including those of the L2 penalty `weight_decay / 2 * |param|^2` for parameters that decay."""
    if not weight_decay:
        return trees.grads
    return [
        grad.add(param, alpha=weight_decay) if decays else grad
        for grad, param, decays in zip(trees.grads, trees.params, trees.decays, strict=True)
    ]
