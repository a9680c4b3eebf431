"""Checks of shapes and types that cost no look at a tensor's values."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["INDEX_DTYPES", "check_same_shape", "class_indices"]

INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def class_indices(place: str, logits: Tensor, targets: Tensor) -> Tensor:
    """The targets as int64, once they fit logits whose classes come last.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: the targets are not whole numbers.
    """
    if logits.ndim == 0 or targets.shape != logits.shape[:-1]:
        hint = ""
        if logits.ndim > 2 and targets.shape == logits.shape[:1] + logits.shape[2:]:
            hint = "; classes come last: logits.movedim(1, -1)"
        elif targets.shape == logits.shape:
            hint = "; targets are class indices: probabilities.argmax(-1)"
        elif targets.shape == (*logits.shape[:-1], 1):
            hint = "; pass targets.squeeze(-1)"
        raise ValueError(
            f"{place}(logits of shape {tuple(logits.shape)}, targets of shape {tuple(targets.shape)}): "
            f"needs logits (..., classes) and targets (...){hint}"
        )
    if targets.dtype is torch.int64:
        return targets
    if targets.dtype not in INDEX_DTYPES:
        raise TypeError(f"{place}(targets of {targets.dtype}): needs class indices; pass targets.long()")
    return targets.long()


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
