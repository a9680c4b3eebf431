"""Checks of shapes and types that cost no look at a tensor's values."""

from __future__ import annotations

from torch import Tensor

__all__ = ["check_same_shape"]


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
