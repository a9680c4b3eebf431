"""Checks of targets' values: each waits for the device, so it is for a run's first batch, or for a loss that failed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from pulsetrain.engine.arrays import Array

__all__ = ["check_finite", "check_labels", "check_probabilities"]


def check_labels(place: str, outputs: Any, targets: Array, ignore_index: int = -100) -> None:
    """Refuses labels outside 0 .. classes - 1.

    Args:
        place: what the error begins with.
        outputs: shape (..., classes); nothing else of them is asked for.
        targets: class indices, shape (...).
        ignore_index: a value that is no label, and allowed.

    Raises:
        ValueError: it names the first of them and where it stands.
    """
    targets, classes = _readable(targets), outputs.shape[-1]
    wrong = ((targets < 0) | (targets >= classes)) & (targets != ignore_index)
    if not wrong.any():
        return
    label, found = _first(wrong, targets)
    labels = targets[targets != ignore_index]
    low, high = int(labels.min()), int(labels.max())
    if (low, high) == (1, classes):
        remedy = "these labels begin with 1: pass targets - 1"
    elif low < 0:
        remedy = f"mark what is to be left out with {ignore_index}, and number the classes from 0"
    else:
        remedy = f"give the model {high + 1} outputs, or number the classes from 0"
    rule = f"needs class indices from 0 to {classes - 1}, as the logits have {classes} classes"
    raise ValueError(f"{place}({label}): {rule}, and {found} are outside; {remedy}")


def check_finite(place: str, targets: Array) -> None:
    """Refuses NaN and infinity among floating point targets.

    Raises:
        ValueError: it names the first of them, where it stands, and how many there are.
    """
    targets = _readable(targets)
    wrong = ~(targets.isfinite() if isinstance(targets, Tensor) else np.isfinite(targets))
    if wrong.any():
        label, found = _first(wrong, targets)
        raise ValueError(
            f"{place}({label}): needs finite numbers, and {found} are not; leave such samples out, or fill them in"
        )


def check_probabilities(place: str, targets: Array) -> None:
    """Refuses targets outside 0 .. 1, and NaN.

    Raises:
        ValueError: it names the first of them, where it stands, and how many there are.
    """
    targets = _readable(targets)
    wrong = ~((targets >= 0) & (targets <= 1))
    if wrong.any():
        label, found = _first(wrong, targets)
        raise ValueError(
            f"{place}({label}): needs probabilities from 0 to 1, and {found} are not; "
            "pass 1.0 for yes and 0.0 for no, or what lies between"
        )


def _readable(targets: Array) -> Tensor | np.ndarray[Any, Any]:
    return targets if isinstance(targets, Tensor) else np.asarray(targets)


def _first(wrong: Any, targets: Any) -> tuple[str, str]:
    """The first of the wrong targets as `targets[row]=value`, and `how many of how many targets`."""
    place = (wrong.nonzero() if isinstance(wrong, Tensor) else np.argwhere(wrong))[0].tolist()
    label = f"targets{place or ''}={targets[tuple(place)].item()}"
    return label, f"{int(wrong.sum())} of {math.prod(targets.shape)} targets"
