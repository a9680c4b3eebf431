"""Losses over numbers: each takes predictions and targets of one shape and returns the mean over all elements."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from engine.losses.shapes import check_same_shape, require

__all__ = ["huber", "l1", "mse"]


def mse(predictions: Tensor, targets: Tensor) -> Tensor:
    """Mean of `(prediction - target) ** 2`; shapes equal, targets floating point."""
    check_same_shape("mse", "predictions", predictions, targets)
    return F.mse_loss(predictions, targets)


def l1(predictions: Tensor, targets: Tensor) -> Tensor:
    """Mean of `|prediction - target|`; shapes equal, targets floating point."""
    check_same_shape("l1", "predictions", predictions, targets)
    return F.l1_loss(predictions, targets)


def huber(predictions: Tensor, targets: Tensor, *, delta: float = 1.0) -> Tensor:
    """Mean of `e ** 2 / 2` where `e = |prediction - target|` is up to delta, and `delta * (e - delta / 2)` beyond.

    Source: Huber 1964. Shapes equal, targets floating point.

    Raises:
        ConfigurationError: delta is no positive number.
    """
    check_same_shape("huber", "predictions", predictions, targets)
    if delta != 1.0:
        require("huber", "delta", delta, lambda delta: 0 < delta < math.inf, "a positive number")
    return F.huber_loss(predictions, targets, delta=delta)
