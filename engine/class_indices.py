"""Checks of class indices against scores whose last dimension is the classes."""

from __future__ import annotations

import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array, misshapen, namespace

__all__ = ["check_class_indices", "check_indices", "is_integral"]

_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_integral(array: Array) -> bool:
    """Whether an array of any library can hold class indices: integers, not bools.

    >>> is_integral(torch.arange(2)), is_integral(torch.ones(2)), is_integral(torch.ones(2) > 0)
    (True, False, False)
    """
    if isinstance(array, Tensor):
        return array.dtype in _INDEX_DTYPES
    return bool(namespace(array).isdtype(array.dtype, "integral"))


def check_indices(place: str, name: str, indices: Tensor) -> None:
    """Rejects tensors that are not integers.

    >>> check_indices("loss", "targets", torch.zeros(2))
    Traceback (most recent call last):
        ...
    TypeError: loss(targets of torch.float32): needs class indices; pass targets.long()
    """
    if indices.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{place}({name} of {indices.dtype}): needs class indices; pass {name}.long()")


def check_class_indices(place: str, scores: Tensor, indices: Tensor, names: tuple[str, str], binary: str) -> None:
    """Rejects shapes that do not fit and indices that are not integers; reads no values.

    >>> check_class_indices("loss", torch.zeros(8, 3), torch.zeros(8, 1).long(), ("logits", "targets"), "use bce")
    Traceback (most recent call last):
        ...
    ValueError: loss(logits of shape (8, 3), targets of shape (8, 1)): ...

    Args:
        place: the start of the error message.
        scores: shape (..., classes).
        indices: shape (...).
        names: the names of the caller's two arguments.
        binary: the remedy for binary targets with a single score.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: the indices are not whole numbers.
    """
    if scores.ndim == 0 or indices.shape != scores.shape[:-1]:
        needs = f"needs {names[0]} (..., classes) and class indices {names[1]} (...)"
        remedy = _remedy(scores, indices, names, binary)
        raise misshapen(place, needs + remedy, **{names[0]: scores, names[1]: indices})
    check_indices(place, names[1], indices)


def _remedy(scores: Tensor, indices: Tensor, names: tuple[str, str], binary: str) -> str:
    """What to pass instead, for common mistakes."""
    if scores.ndim > 2 and indices.shape == scores.shape[:1] + scores.shape[2:]:
        return f"; classes come last: {names[0]}.movedim(1, -1)"
    if scores.ndim and indices.shape == (*scores.shape[:-1], 1):
        return f"; pass {names[1]}.squeeze(-1)" if scores.shape[-1] > 1 else f"; {binary}"
    if indices.shape == scores.shape:
        return f"; {binary}" if indices.ndim < 2 else f"; {binary}, for rows of probabilities {names[1]}.argmax(-1)"
    return ""
