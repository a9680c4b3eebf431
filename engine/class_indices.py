"""Class indices beside scores whose classes come last: what fits, and what to pass instead."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_indices", "check_labels_fit", "is_index_dtype"]

_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_index_dtype(dtype: torch.dtype) -> bool:
    """Whether values of this type number something."""
    return dtype in _INDEX_DTYPES


def check_indices(place: str, name: str, labels: Tensor) -> None:
    """Refuses what numbers nothing.

    Raises:
        TypeError: the labels are not whole numbers.
    """
    if labels.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{place}({name} of {labels.dtype}): needs class indices; pass {name}.long()")


def check_labels_fit(place: str, scores: Tensor, labels: Tensor, names: tuple[str, str], binary: str) -> None:
    """Refuses shapes that do not fit and labels that are no whole numbers; looks at no value.

    Args:
        place: who asks, for the message.
        scores: shape (..., classes).
        labels: shape (...).
        names: what the caller's arguments are called.
        binary: the remedy where there is one score for yes and no.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: the labels are not whole numbers.
    """
    if scores.ndim == 0 or labels.shape != scores.shape[:-1]:
        raise ValueError(
            f"{place}({names[0]} of shape {tuple(scores.shape)}, {names[1]} of shape {tuple(labels.shape)}): "
            f"needs {names[0]} (..., classes) and class indices {names[1]} (...)"
            f"{_remedy(scores, labels, names, binary)}"
        )
    check_indices(place, names[1], labels)


def _remedy(scores: Tensor, labels: Tensor, names: tuple[str, str], binary: str) -> str:
    """What to pass instead, for the mistakes that are often made."""
    if scores.ndim > 2 and labels.shape == scores.shape[:1] + scores.shape[2:]:
        return f"; classes come last: {names[0]}.movedim(1, -1)"
    if scores.ndim and labels.shape == (*scores.shape[:-1], 1):
        return f"; pass {names[1]}.squeeze(-1)" if scores.shape[-1] > 1 else f"; {binary}"
    if labels.shape == scores.shape:
        return (
            f"; {binary}" if labels.ndim < 2 else f"; {binary}, for a row of probabilities each {names[1]}.argmax(-1)"
        )
    return ""
