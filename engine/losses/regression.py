"""Losses over numbers: each takes predictions and targets of equal shape and returns the mean over all elements."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.losses import on_arrays
from pulsetrain.engine.losses.shapes import check_same_shape, require

__all__ = ["huber", "l1", "mse"]


def mse(predictions: Array, targets: Array) -> Array:
    """Mean of `(prediction - target) ** 2`; shapes equal, targets floating point.

    >>> import torch
    >>> mse(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0]))
    tensor(2.5000)

    Raises:
        ValueError: the shapes differ; they are never broadcast.
        TypeError: the targets are not floating point numbers.
    """
    check_same_shape("mse", "predictions", predictions, targets)
    if isinstance(predictions, Tensor):
        return F.mse_loss(predictions, targets)
    return on_arrays.mse(predictions, targets)


def l1(predictions: Array, targets: Array) -> Array:
    """Mean of `|prediction - target|`; shapes equal, targets floating point.

    >>> import torch
    >>> l1(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0]))
    tensor(1.5000)

    Raises:
        ValueError: the shapes differ; they are never broadcast.
        TypeError: the targets are not floating point numbers.
    """
    check_same_shape("l1", "predictions", predictions, targets)
    if isinstance(predictions, Tensor):
        return F.l1_loss(predictions, targets)
    return on_arrays.l1(predictions, targets)


def huber(predictions: Array, targets: Array, *, delta: float = 1.0) -> Array:
    """Mean of `e ** 2 / 2` where `e = |prediction - target|` is at most delta, and of `delta * (e - delta / 2)` above.

    Source: Huber 1964. Shapes equal, targets floating point.

    >>> import torch
    >>> huber(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0]), delta=1.0)  # mean of 0.5 and 1.5
    tensor(1.)

    Raises:
        ConfigurationError: delta is not a positive number.
        ValueError: the shapes differ; they are never broadcast.
        TypeError: the targets are not floating point numbers.
    """
    check_same_shape("huber", "predictions", predictions, targets)
    if delta != 1.0:
        require("huber", "delta", delta, lambda delta: 0 < delta < math.inf, "a positive number")
    if isinstance(predictions, Tensor):
        return F.huber_loss(predictions, targets, delta=delta)
    return on_arrays.huber(predictions, targets, delta=delta)
