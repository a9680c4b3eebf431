"""Checks of shapes, types and options; none of them reads a tensor's values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from pulsetrain.engine.arrays import Array, is_floating, misshapen, namespace
from pulsetrain.engine.class_indices import check_class_indices
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["POSITIVE", "SHARE", "check_classes_last", "check_same_shape", "require"]

T = TypeVar("T")

POSITIVE: tuple[Callable[[Any], bool], str] = (lambda value: 0.0 < value < math.inf), "a positive number"
SHARE: tuple[Callable[[Any], bool], str] = (lambda value: 0.0 <= value <= 1.0), "a number from 0 to 1"


def require(place: str, argument: str, value: T, rule: Callable[[T], bool], needs: str) -> None:
    """Raises ConfigurationError unless the rule, which compares the value with numbers, holds.

    >>> require("mixup", "alpha", -1.0, lambda alpha: alpha > 0, "a positive number")
    Traceback (most recent call last):
        ...
    pulsetrain.engine.errors.ConfigurationError: mixup(alpha=-1.0): needs a positive number
    """
    try:
        fits = rule(value)
    except (TypeError, ValueError, RuntimeError):  # a string or a list; an array of several values
        fits = False
    if not fits:
        raise ConfigurationError(f"needs {needs}", place, **{argument: value})


def check_classes_last(place: str, logits: Array, targets: Array) -> None:
    """Rejects shapes other than logits (..., classes) and targets (...), and torch targets that are not integers.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: the targets are not whole numbers.
    """
    check_class_indices(place, logits, targets, ("logits", "targets"), "for binary targets, use bce_with_logits")


def check_same_shape(place: str, argument: str, values: Array, targets: Array) -> None:
    """Rejects shapes that torch would broadcast: (n, 1) against (n,) gives an (n, n) loss, which trains, but wrongly.

    Raises:
        ValueError: the shapes differ.
        TypeError: the targets are not floating point numbers.
    """
    if values.shape != targets.shape:
        hint = ""
        if values.ndim == targets.ndim + 1 and values.shape[-1] == 1:
            hint = f"; pass {argument}.squeeze(-1)"
        elif targets.ndim == values.ndim + 1 and targets.shape[-1] == 1:
            hint = "; pass targets.squeeze(-1)"
        raise misshapen(place, f"needs equal shapes{hint}", **{argument: values, "targets": targets})
    try:
        floating, remedy = targets.is_floating_point(), "targets.float()"
    except AttributeError:  # not a torch tensor; asking first would slow down every loss over torch tensors
        namespace(values, targets, place=place)
        floating, remedy = is_floating(targets), "targets.astype('float32')"
    if not floating:
        raise TypeError(f"{place}(targets of {targets.dtype}): needs floating point numbers; pass {remedy}")
