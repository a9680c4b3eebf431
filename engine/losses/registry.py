"""Losses by name, and the checks of target values that each one needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.arrays import Array, has_values, is_array, is_floating, namespace
from pulsetrain.engine.class_indices import is_integral
from pulsetrain.engine.errors import ConfigurationError, did_you_mean
from pulsetrain.engine.losses.checks import (
    check_finite,
    check_labels,
    check_probabilities,
    warn_of_sigmoid,
    warn_of_softmax,
)
from pulsetrain.engine.losses.classification import bce_with_logits, cross_entropy, focal_loss
from pulsetrain.engine.losses.regression import huber, l1, mse

__all__ = ["Loss", "check_first_batch", "check_first_loss", "class_weights", "get_loss", "ignored_label"]

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

_OVER_LABELS = (cross_entropy, focal_loss)
_OVER_PROBABILITIES = (bce_with_logits,)
_TORCHS_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_TORCHS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)


def get_loss(name_or_callable: str | Loss, **options: object) -> Loss:
    """The loss with a name; a function or module that already is a loss is returned unchanged.

    >>> loss = get_loss("cross_entropy", label_smoothing=0.1)
    >>> loss(torch.zeros(1, 4), torch.tensor([2]))
    tensor(1.3863)
    >>> get_loss("l2")
    Traceback (most recent call last):
        ...
    pulsetrain.engine.errors.ConfigurationError: get_loss(name='l2'): unknown; ...

    Args:
        options: keywords of a named loss, such as `label_smoothing=0.1`; the result is then a `functools.partial`.

    Raises:
        ConfigurationError: a name or option is unknown, an option is out of range, options are given without a name, or
            the argument is a class or not callable.
    """
    if isinstance(name_or_callable, str):
        check_choice("get_loss", "name", name_or_callable, _NAMED)
        loss = _NAMED[name_or_callable]
        if not options:
            return loss
        _check_options(name_or_callable, loss, options)
        return partial(loss, **options)
    if isinstance(name_or_callable, type):
        rule = f"needs an instance, not the class; pass {name_or_callable.__name__}()"
        raise ConfigurationError(rule, "get_loss", name=name_or_callable)
    if not callable(name_or_callable):
        rule = f"needs a function (outputs, targets) -> Tensor, or one of {', '.join(sorted(_NAMED))}"
        raise ConfigurationError(rule, "get_loss", name=name_or_callable)
    if options:
        rule = "only a loss given by name accepts options; pass functools.partial(loss, ...)"
        raise ConfigurationError(rule, "get_loss", **options)
    return name_or_callable


def ignored_label(loss: str | Loss) -> int | None:
    """The `ignore_index` of a loss over labels; None for any other loss.

    >>> ignored_label("cross_entropy"), ignored_label(nn.CrossEntropyLoss(ignore_index=0)), ignored_label("mse")
    (-100, 0, None)

    Args:
        loss: a loss of this package by name; one of these, F.cross_entropy or F.nll_loss as a function or as a
            `functools.partial`; or an instance of nn.CrossEntropyLoss or nn.NLLLoss.
    """
    function, options = _opened(loss)
    if function in (*_OVER_LABELS, *_TORCHS_FUNCTIONS):
        return int(options.get("ignore_index", -100))
    return function.ignore_index if isinstance(function, _TORCHS_MODULES) else None


def class_weights(loss: str | Loss) -> Tensor | None:
    """The weight of each class, shape (classes,), if the loss is a mean weighted by them; None for any other loss.

    torch divides the sum over the labels by the sum of their weights, with label_smoothing as well; over targets that
    are probabilities, it divides by their number.

    >>> class_weights(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])))
    tensor([1., 2.])

    Args:
        loss: nn.CrossEntropyLoss or nn.NLLLoss with a `weight`, or a `functools.partial` of F.cross_entropy or
            F.nll_loss with one.
    """
    function, options = _opened(loss)
    if isinstance(function, _TORCHS_MODULES):
        options = {"weight": function.weight, "reduction": function.reduction}
    elif function not in _TORCHS_FUNCTIONS:
        return None
    return options.get("weight") if options.get("reduction", "mean") == "mean" else None


def check_first_batch(loss: str | Loss, outputs: Array, targets: Array) -> None:
    """Rejects targets whose values are invalid for the loss; it waits for the device, so call it once a run.

    Labels must be classes of the outputs, probabilities lie from 0 to 1, and other floating point targets be finite.
    Outputs to which a softmax or a sigmoid has been applied are warned of, where the loss applies one itself.
    Targets that are not arrays, or whose shape or dtype the loss itself rejects, are left to the loss. So are tracers
    inside `jax.jit`, which have no values.

    >>> check_first_batch("cross_entropy", torch.zeros(2, 3), torch.tensor([0, 3]))
    Traceback (most recent call last):
        ...
    ValueError: cross_entropy(targets[1]=3): needs class indices from 0 to 2, as the logits have 3 classes, and ...

    Args:
        outputs: the outputs the loss will be called with, or any object with their `shape`.
        loss: a name or a callable. The losses of this package (or a `functools.partial` of one) are recognised, and so
            is torch's cross entropy over outputs of shape (rows, classes). For any other loss nothing is rejected,
            because NaN may have a meaning there; see `check_first_loss`.

    Raises:
        ValueError: names the first such target, its index, and how many there are.
    """
    if not is_array(targets) or not has_values(targets):
        return
    function, options = _opened(loss)
    place = loss if isinstance(loss, str) else getattr(function, "__name__", type(function).__name__)
    if function in _OVER_LABELS or _is_torchs_cross_entropy(function):
        # torch puts the classes second: with more than 2 dimensions this matches only if the last one has that size
        shape = getattr(outputs, "shape", ())
        if shape and targets.shape == shape[:-1] and is_integral(targets):
            ignored = getattr(function, "ignore_index", options.get("ignore_index", -100))
            check_labels(place, outputs, targets, ignored)
            warn_of_softmax(place, outputs)
    elif function in _OVER_PROBABILITIES and is_floating(targets):
        check_probabilities(place, targets)
        warn_of_sigmoid(place, outputs)
    elif function is F.binary_cross_entropy_with_logits or isinstance(function, nn.BCEWithLogitsLoss):
        warn_of_sigmoid(place, outputs)
    elif function in _NAMED.values() and is_floating(targets):
        check_finite(place, targets)


def check_first_loss(loss: Array, targets: object, place: str) -> None:
    """Rejects targets that are not finite if the loss is not finite; it waits for the device, so call it once a run.

    >>> check_first_loss(torch.tensor(float("nan")), torch.tensor([1.0, float("inf")]), "my_loss")
    Traceback (most recent call last):
        ...
    ValueError: my_loss(targets[1]=inf): needs finite numbers, and 1 of 2 targets are not; ...

    Raises:
        ValueError: names the first such target, its index, and how many there are.
    """
    if not is_array(targets) or not is_floating(targets) or not has_values(targets) or not has_values(loss):
        return
    if not namespace(loss).isfinite(loss):
        check_finite(place, targets)


def _opened(loss: str | Loss) -> tuple[Any, Mapping[str, Any]]:
    """The function or module of a name or a partial, and the partial's keywords."""
    if isinstance(loss, str):
        return _NAMED.get(loss), {}
    return (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})


def _is_torchs_cross_entropy(function: object) -> bool:
    # a subclass that overrides forward may give its targets a different meaning
    theirs = isinstance(function, nn.CrossEntropyLoss) and type(function).forward is nn.CrossEntropyLoss.forward
    return theirs or function is F.cross_entropy


def _check_options(name: str, loss: Loss, options: Mapping[str, Any]) -> None:
    """Rejects unknown options, and values that the loss itself rejects when called on zeros."""
    parameters = inspect.signature(loss).parameters.values()
    choices = sorted(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    for key, value in options.items():
        if key not in choices:
            takes = f"it takes {', '.join(choices)}" if choices else "it takes no option"
            raise ConfigurationError(
                f"unknown to {name!r}; {takes}{did_you_mean(key, choices)}", "get_loss", **{key: value}
            )
    of_classes = [value for value in options.values() if is_array(value) and value.ndim]  # a weight for each
    if loss in _OVER_LABELS and of_classes and not isinstance(of_classes[0], Tensor):
        xp = namespace(of_classes[0])
        loss(xp.zeros((1, *of_classes[0].shape[-1:])), xp.zeros((1,), dtype=xp.int32), **options)
        return
    classes, device = (of_classes[0].shape[-1], of_classes[0].device) if of_classes else (2, torch.device("cpu"))
    with torch.no_grad():
        if loss in _OVER_LABELS:
            loss(torch.zeros(1, classes, device=device), torch.zeros(1, dtype=torch.int64, device=device), **options)
        else:
            loss(torch.zeros(1, device=device), torch.zeros(1, device=device), **options)
