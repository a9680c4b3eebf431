"""Checks of the values of targets. Each waits for the device: use them for a run's first batch or a failed loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from pulsetrain.engine.arrays import Array, has_values
from pulsetrain.engine.logs import get_logger

__all__ = [
    "check_finite",
    "check_labels",
    "check_probabilities",
    "readable",
    "reject",
    "warn_of_sigmoid",
    "warn_of_softmax",
]

_ENOUGH = 20  # values, of which logits are hardly ever all positive
_logger = get_logger("engine")


def check_labels(place: str, outputs: Array, targets: Array, ignore_index: int = -100) -> None:
    """Rejects labels outside 0 .. classes - 1.

    >>> import torch
    >>> check_labels("loss", torch.zeros(3, 2), torch.tensor([0, 1, 2]))
    Traceback (most recent call last):
        ...
    ValueError: loss(targets[2]=2): needs class indices from 0 to 1, as the logits have 2 classes, and 1 of 3 ...

    Args:
        place: the start of the error message.
        outputs: shape (..., classes); only their shape is used.
        targets: class indices, shape (...).
        ignore_index: this value is allowed too.

    Raises:
        ValueError: a label is out of range; names the first one and its index.
    """
    targets, classes = readable(targets), outputs.shape[-1]
    wrong = ((targets < 0) | (targets >= classes)) & (targets != ignore_index)
    if not wrong.any():
        return
    labels = targets[targets != ignore_index]
    low, high = int(labels.min()), int(labels.max())
    if (low, high) == (1, classes):
        remedy = "these labels start at 1: pass targets - 1"
    elif low < 0:
        remedy = f"use {ignore_index} for targets to ignore, and number the classes from 0"
    else:
        remedy = f"give the model {high + 1} outputs, or number the classes from 0"
    rule = f"needs class indices from 0 to {classes - 1}, as the logits have {classes} classes"
    reject(place, "targets", targets, wrong, rule, f"outside; {remedy}")


def check_finite(place: str, targets: Array) -> None:
    """Rejects NaN and infinity in floating point targets.

    >>> import torch
    >>> check_finite("loss", torch.tensor([0.5, float("nan")]))
    Traceback (most recent call last):
        ...
    ValueError: loss(targets[1]=nan): needs finite numbers, and 1 of 2 targets are not; ...

    Raises:
        ValueError: names the first such target, its index, and how many there are.
    """
    targets = readable(targets)
    wrong = ~(targets.isfinite() if isinstance(targets, Tensor) else np.isfinite(targets))
    reject(place, "targets", targets, wrong, "needs finite numbers", "not; leave such samples out, or replace them")


def check_probabilities(place: str, targets: Array) -> None:
    """Rejects targets outside 0 .. 1, and NaN.

    >>> import torch
    >>> check_probabilities("loss", torch.tensor([0.0, 1.0, 2.0]))
    Traceback (most recent call last):
        ...
    ValueError: loss(targets[2]=2.0): needs probabilities from 0 to 1, and 1 of 3 targets are not; ...

    Raises:
        ValueError: names the first such target, its index, and how many there are.
    """
    targets = readable(targets)
    remedy = "not; pass 1.0 for yes, 0.0 for no, or a number in between"
    reject(place, "targets", targets, ~((targets >= 0) & (targets <= 1)), "needs probabilities from 0 to 1", remedy)


def warn_of_softmax(place: str, outputs: object) -> None:
    """Warns if each row of the logits, shape (rows, classes), sums to 1, as after a softmax; only in training."""

    def sums_to_1(values: Tensor) -> Tensor:
        return (values >= 0).all() & ((values.sum(-1) - 1).abs() < 1e-3).all()

    if isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] >= 2 and _are(outputs, sums_to_1):
        _logger.warning(
            "each row of the model's output sums to 1, as after a softmax, and the loss applies one itself; let the "
            "model return the logits",
            loss=place,
        )


def warn_of_sigmoid(place: str, outputs: object) -> None:
    """Warns if all logits, of any shape, lie between 0 and 1, as after a sigmoid; only in training."""

    def are_shares(values: Tensor) -> Tensor:
        return ((values > 0) & (values < 1)).all()  # neither is true of a model whose weights are still 0

    if isinstance(outputs, Tensor) and outputs.numel() >= _ENOUGH and _are(outputs, are_shares):
        _logger.warning(
            "all outputs of the model lie between 0 and 1, as after a sigmoid, and the loss applies one itself; "
            "let the model return the logits",
            loss=place,
        )


def _are(outputs: Tensor, condition: Callable[[Tensor], Tensor]) -> bool:
    """Whether the condition is true of the first rows of a model that is trained."""
    if not outputs.requires_grad or not has_values(outputs):
        return False
    try:
        return bool(condition(outputs.detach()[:100].float()))
    except RuntimeError:  # values inside of torch.func.vmap cannot be read
        return False


def readable(targets: Array) -> Tensor | np.ndarray[Any, Any]:
    """The values, as torch or numpy can index them."""
    return targets if isinstance(targets, Tensor) else np.asarray(targets)


def reject(place: str, name: str, values: Array, wrong: Array, rule: str, remedy: str) -> None:
    """Raise ValueError if any value is wrong.

    Raises:
        ValueError: names the first one, its index, and how many there are.
    """
    if not wrong.any():
        return
    first = (wrong.nonzero() if isinstance(wrong, Tensor) else np.argwhere(wrong))[0].tolist()
    found = f"{int(wrong.sum())} of {math.prod(values.shape)} {name}"
    raise ValueError(f"{place}({name}{first or ''}={values[tuple(first)].item()}): {rule}, and {found} are {remedy}")
