"""Losses over numbers: each takes predictions and targets of equal shape and returns the mean over all elements."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pulsetrain.engine.arrays import Array, at_least_float32, namespace
from pulsetrain.engine.losses.on_arrays import mean_as
from pulsetrain.engine.losses.shapes import POSITIVE, check_same_shape, require

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
    return mean_as(_errors("mse", predictions, targets) ** 2, predictions, targets)


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
    return mean_as(abs(_errors("l1", predictions, targets)), predictions, targets)


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
        require("huber", "delta", delta, *POSITIVE)
    if isinstance(predictions, Tensor):
        return F.huber_loss(predictions, targets, delta=delta)
    errors, delta = abs(_errors("huber", predictions, targets)), float(delta)
    xp = namespace(errors)
    small = xp.where(errors <= delta, errors, 0.0)  # an infinite error times a gradient of 0 would give nan
    return mean_as(xp.where(errors <= delta, 0.5 * small**2, delta * (errors - 0.5 * delta)), predictions, targets)


def _errors(place: str, predictions: Array, targets: Array) -> Array:
    namespace(predictions, targets, place=place)
    return at_least_float32(predictions) - at_least_float32(targets)
