"""Checks and computations that the functional optimizers share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers.functional.trees import DecayMask, Trees
from pulsetrain.engine.optimizers.options import check_number, checked_options

__all__ = ["check", "decayed", "scaled"]


def check(
    place: str,
    name: str,
    learning_rate: float,
    weight_decay: float,
    decay_mask: DecayMask,
    options: Mapping[str, object],
) -> dict[str, Any]:
    """The options under torch's names, checked by the rules of `create_optimizer`.

    Raises:
        ConfigurationError: a keyword is unknown, or a value is out of range.
    """
    try:
        checked = checked_options(name, options)
        check_number("learning_rate", learning_rate, lambda rate: 0 < rate < math.inf, "a positive number")
        check_number("weight_decay", weight_decay, lambda decay: 0 <= decay < math.inf, "a number that is not negative")
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("create_optimizer(", f"{place}(", 1)) from None
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
