"""Losses by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.errors import ConfigurationError, unknown_name
from engine.losses.classification import bce_with_logits, cross_entropy
from engine.losses.regression import huber, l1, mse

__all__ = ["Loss", "get_loss"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""`loss(outputs, targets)`: a scalar tensor."""

_NAMED: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "mse": mse,
    "l1": l1,
    "huber": huber,
    "bce_with_logits": bce_with_logits,
}


def get_loss(name_or_callable: str | Loss) -> Loss:
    """The loss of that name; a function or a module that is one already comes back as it is.

    Raises:
        ConfigurationError: an unknown name, a class instead of an instance, or nothing that can be called.
    """
    if isinstance(name_or_callable, str):
        if name_or_callable not in _NAMED:
            raise unknown_name("get_loss", "name", name_or_callable, _NAMED)
        return _NAMED[name_or_callable]
    if isinstance(name_or_callable, type):
        name = name_or_callable.__name__
        raise ConfigurationError(f"get_loss({name}): needs an instance, not the class; pass {name}()")
    if not callable(name_or_callable):
        raise ConfigurationError(
            f"get_loss({name_or_callable!r}): needs a function (outputs, targets) -> Tensor, or one of "
            f"{', '.join(sorted(_NAMED))}"
        )
    return name_or_callable
