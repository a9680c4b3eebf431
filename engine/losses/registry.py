"""Losses by name, and what each asks of its targets' values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from engine.errors import ConfigurationError, unknown_name
from engine.labels import is_index_dtype
from engine.losses.checks import check_finite, check_labels, check_probabilities
from engine.losses.classification import bce_with_logits, cross_entropy, focal_loss
from engine.losses.regression import huber, l1, mse

__all__ = ["Loss", "check_first_batch", "check_first_loss", "get_loss"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""`loss(outputs, targets)`: a scalar tensor."""

_NAMED: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "focal": focal_loss,
    "mse": mse,
    "l1": l1,
    "huber": huber,
    "bce_with_logits": bce_with_logits,
}

_OF_LABELS = (cross_entropy, focal_loss)
_OF_PROBABILITIES = (bce_with_logits,)


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


def check_first_batch(loss: str | Loss, outputs: Any, targets: Any) -> None:
    """Refuses targets whose values the loss cannot mean: once a run, for it waits for the device.

    Labels have to be classes of the outputs, probabilities lie from 0 to 1, other floating point targets be finite.
    What is no tensor, or of a shape or type that the loss itself refuses, is left to it.

    Args:
        loss: a name, or a callable: one of ours (perhaps a `functools.partial` of it) is known for what it is. Another
            one may take NaN for a sign of its own, so nothing is refused: see `check_first_loss`.

    Raises:
        ValueError: it names the first such target, where it stands, and how many there are.
    """
    if not isinstance(targets, Tensor):
        return
    options = loss.keywords if isinstance(loss, partial) else {}
    function: Any = loss.func if isinstance(loss, partial) else loss
    place = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
    function = _NAMED.get(function, function) if isinstance(function, str) else function
    if function in _OF_LABELS:
        fits = isinstance(outputs, Tensor) and outputs.ndim > 0 and targets.shape == outputs.shape[:-1]
        if fits and is_index_dtype(targets.dtype):
            check_labels(place, outputs, targets, options.get("ignore_index", -100))
    elif function in _OF_PROBABILITIES and targets.is_floating_point():
        check_probabilities(place, targets)
    elif function in _NAMED.values() and targets.is_floating_point():
        check_finite(place, targets)


def check_first_loss(loss: Tensor, targets: Any, place: str) -> None:
    """Refuses targets that are not finite where the loss that they gave is not: once a run, as above.

    Raises:
        ValueError: it names the first such target, where it stands, and how many there are.
    """
    if isinstance(targets, Tensor) and targets.is_floating_point() and not loss.isfinite():
        check_finite(place, targets)
