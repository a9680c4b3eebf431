"""Checks of shapes, types and options that cost no look at a tensor's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.errors import ConfigurationError

__all__ = ["check_same_shape", "require"]


def require(place: str, argument: str, value: Any, rule: Callable[[Any], bool], needs: str) -> None:
    """Raises ConfigurationError unless the rule, which compares the value with numbers, holds."""
    try:
        fits = rule(value)
    except (TypeError, ValueError, RuntimeError):  # a text or a list; an array or a tensor of several values
        fits = False
    if not fits:
        raise ConfigurationError(f"{place}({argument}={value!r}): needs {needs}")


def check_same_shape(place: str, argument: str, values: Tensor, targets: Tensor) -> None:
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
    if not targets.is_floating_point():
        raise TypeError(f"{place}(targets of {targets.dtype}): needs floating point numbers; pass targets.float()")
