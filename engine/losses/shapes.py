"""Checks of shapes, types and options that cost no look at a tensor's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pulsetrain.engine.arrays import Array, is_floating, namespace
from pulsetrain.engine.class_indices import check_labels_fit
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["check_classes_last", "check_same_shape", "require"]


def require(place: str, argument: str, value: Any, rule: Callable[[Any], bool], needs: str) -> None:
    """Raises ConfigurationError unless the rule, which compares the value with numbers, holds."""
    try:
        fits = rule(value)
    except (TypeError, ValueError, RuntimeError):  # a text or a list; an array or a tensor of several values
        fits = False
    if not fits:
        raise ConfigurationError(f"{place}({argument}={value!r}): needs {needs}")


def check_classes_last(place: str, logits: Array, targets: Array) -> None:
    """Refuses logits that are not (..., classes) beside targets of shape (...), and torch targets that number nothing.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: the targets are not whole numbers.
    """
    check_labels_fit(place, logits, targets, ("logits", "targets"), "for yes and no use bce_with_logits")


def check_same_shape(place: str, argument: str, values: Array, targets: Array) -> None:
    """Refuses what torch would broadcast: (n, 1) against (n,) makes an (n, n) loss that trains, and wrongly.

    Raises:
        ValueError: the shapes differ.
        TypeError: the targets are no floating point numbers.
    """
    if values.shape != targets.shape:
        hint = ""
        if values.ndim == targets.ndim + 1 and values.shape[-1] == 1:
            hint = f"; pass {argument}.squeeze(-1)"
        elif targets.ndim == values.ndim + 1 and targets.shape[-1] == 1:
            hint = "; pass targets.squeeze(-1)"
        raise ValueError(
            f"{place}({argument} of shape {tuple(values.shape)}, targets of shape {tuple(targets.shape)}): "
            f"needs equal shapes{hint}"
        )
    try:
        floating, remedy = targets.is_floating_point(), "targets.float()"
    except AttributeError:  # no tensor of torch; to ask first would cost each of torch's losses something
        namespace(values, targets, place=place)
        floating, remedy = is_floating(targets), "targets.astype('float32')"
    if not floating:
        raise TypeError(f"{place}(targets of {targets.dtype}): needs floating point numbers; pass {remedy}")
