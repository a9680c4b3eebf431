"""Losses by name, and what each asks of its targets' values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pulsetrain.engine.arrays import Array, has_values, is_array, is_floating, namespace
from pulsetrain.engine.class_indices import is_index_dtype
from pulsetrain.engine.errors import ConfigurationError, unknown_name
from pulsetrain.engine.losses.checks import check_finite, check_labels, check_probabilities
from pulsetrain.engine.losses.classification import bce_with_logits, cross_entropy, focal_loss
from pulsetrain.engine.losses.regression import huber, l1, mse

__all__ = ["Loss", "check_first_batch", "check_first_loss", "get_loss", "ignored_label"]

Loss = Callable[[Array, Array], Array]
"""`loss(outputs, targets)`: shape ()."""

_NAMED: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "focal": focal_loss,
    "mse": mse,
    "l1": l1,
    "huber": huber,
    "bce_with_logits": bce_with_logits,
    "bce": bce_with_logits,
}

_OF_LABELS = (cross_entropy, focal_loss)
_OF_PROBABILITIES = (bce_with_logits,)


def get_loss(name_or_callable: str | Loss, **options: Any) -> Loss:
    """The loss of that name; a function or a module that is one already comes back as it is.

    Args:
        options: keywords of a named loss, `label_smoothing=0.1` say; the result is then a `functools.partial` of it.

    Raises:
        ConfigurationError: an unknown name or option, an option out of range, options without a name, a class instead
            of an instance, or nothing that can be called.
    """
    if isinstance(name_or_callable, str):
        if name_or_callable not in _NAMED:
            raise unknown_name("get_loss", "name", name_or_callable, _NAMED)
        loss = _NAMED[name_or_callable]
        if not options:
            return loss
        _check_options(name_or_callable, loss, options)
        return partial(loss, **options)
    if isinstance(name_or_callable, type):
        name = name_or_callable.__name__
        raise ConfigurationError(f"get_loss({name}): needs an instance, not the class; pass {name}()")
    if not callable(name_or_callable):
        raise ConfigurationError(
            f"get_loss({name_or_callable!r}): needs a function (outputs, targets) -> Tensor, or one of "
            f"{', '.join(sorted(_NAMED))}"
        )
    if options:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigurationError(
            f"get_loss({given}): only a loss given by its name takes options; pass functools.partial(loss, ...)"
        )
    return name_or_callable


def ignored_label(loss: str | Loss) -> int | None:
    """The `ignore_index` of a loss over labels; None for every other loss, and for one that is not known here.

    Args:
        loss: one of ours by name, as a function or a `functools.partial` of it, or an instance of nn.CrossEntropyLoss
            or nn.NLLLoss.
    """
    function, options = _opened(loss)
    if function in _OF_LABELS:
        return int(options.get("ignore_index", -100))
    return function.ignore_index if isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)) else None


def check_first_batch(loss: str | Loss, outputs: Any, targets: Any) -> None:
    """Refuses targets whose values the loss cannot mean: once a run, for it waits for the device.

    Labels have to be classes of the outputs, probabilities lie from 0 to 1, other floating point targets be finite.
    What is no array, or of a shape or type that the loss itself refuses, is left to it; so is what stands for an array
    inside `jax.jit`, where there is no value to look at.

    Args:
        outputs: what the loss will be given, or anything else with their `shape`.
        loss: a name, or a callable: one of ours (perhaps a `functools.partial` of it) is known for what it is, and so
            is torch's cross entropy over outputs of shape (rows, classes). Another one may take NaN for a sign of its
            own, so nothing is refused: see `check_first_loss`.

    Raises:
        ValueError: it names the first such target, where it stands, and how many there are.
    """
    if not is_array(targets) or not has_values(targets):
        return
    function, options = _opened(loss)
    place = loss if isinstance(loss, str) else getattr(function, "__name__", type(function).__name__)
    if function in _OF_LABELS or _is_torchs_cross_entropy(function):
        # torch has the classes second: beyond 2 dimensions that fits only where the last one is as long
        shape = getattr(outputs, "shape", ())
        if shape and targets.shape == shape[:-1] and _numbers_something(targets):
            ignored = getattr(function, "ignore_index", options.get("ignore_index", -100))
            check_labels(place, outputs, targets, ignored)
    elif function in _OF_PROBABILITIES and is_floating(targets):
        check_probabilities(place, targets)
    elif function in _NAMED.values() and is_floating(targets):
        check_finite(place, targets)


def check_first_loss(loss: Array, targets: Any, place: str) -> None:
    """Refuses targets that are not finite where the loss that they gave is not: once a run, as above.

    Raises:
        ValueError: it names the first such target, where it stands, and how many there are.
    """
    if not is_array(targets) or not is_floating(targets) or not has_values(targets) or not has_values(loss):
        return
    if not namespace(loss).isfinite(loss):
        check_finite(place, targets)


def _opened(loss: str | Loss) -> tuple[Any, Mapping[str, Any]]:
    """The function or module behind a name or a partial, and the partial's keywords."""
    if isinstance(loss, str):
        return _NAMED.get(loss), {}
    return (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})


def _numbers_something(targets: Array) -> bool:
    if isinstance(targets, Tensor):
        return is_index_dtype(targets.dtype)
    return bool(namespace(targets).isdtype(targets.dtype, "integral"))


def _is_torchs_cross_entropy(function: Any) -> bool:
    # a subclass with a forward of its own may mean something else by its targets
    theirs = isinstance(function, nn.CrossEntropyLoss) and type(function).forward is nn.CrossEntropyLoss.forward
    return theirs or function is F.cross_entropy


def _check_options(name: str, loss: Loss, options: Mapping[str, Any]) -> None:
    """Refuses what the loss does not take, and values that it refuses beside targets of zero."""
    parameters = inspect.signature(loss).parameters.values()
    choices = sorted(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    for key, value in options.items():
        if key not in choices:
            takes = f"it takes {', '.join(choices)}" if choices else "it takes no option"
            raise ConfigurationError(f"get_loss({key}={value!r}): unknown to {name!r}; {takes}")
    of_classes = [value for value in options.values() if is_array(value) and value.ndim]  # a weight for each
    if loss in _OF_LABELS and of_classes and not isinstance(of_classes[0], Tensor):
        xp = namespace(of_classes[0])
        loss(xp.zeros((1, *of_classes[0].shape[-1:])), xp.zeros((1,), dtype=xp.int32), **options)
        return
    classes, device = (of_classes[0].shape[-1], of_classes[0].device) if of_classes else (2, torch.device("cpu"))
    with torch.no_grad():
        if loss in _OF_LABELS:
            loss(torch.zeros(1, classes, device=device), torch.zeros(1, dtype=torch.int64, device=device), **options)
        else:
            loss(torch.zeros(1, device=device), torch.zeros(1, device=device), **options)
