"""Losses over classes: one of many (cross entropy, focal), or yes and no each (binary cross entropy)."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pulsetrain.engine.arrays import Array, is_array, namespace
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import on_arrays
from pulsetrain.engine.losses.checks import check_labels
from pulsetrain.engine.losses.chunked import chunked_cross_entropy
from pulsetrain.engine.losses.shapes import check_classes_last, check_same_shape, require

__all__ = ["bce_with_logits", "cross_entropy", "focal_loss"]

_NOT_NEGATIVE = (lambda value: 0.0 <= value < math.inf), "a finite number of at least 0"


def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> Array:
    """Mean of `-log softmax(logits)[target]` over the targets that are not ignored, in nats.

    Args:
        logits: shape (..., classes).
        targets: class indices, shape (...).
        label_smoothing: the part of each target that is spread over all classes, from 0 to 1.
        ignore_index: targets of this value count neither for the sum nor for the mean.
        z_loss: weight of the mean of `logsumexp(logits) ** 2`, which keeps logits from drifting (Chowdhery et al. 2022,
            section 5).
        chunk_size: go through so many classes at a time (8192, say), in float32 at least. The forward pass then holds
            no second tensor of the logits' size, the backward pass their gradient alone; the loss has no second
            derivative. To hold no logits at all, see `torch.nn.functional.linear_cross_entropy`.

    Returns:
        Scalar; nan where every target is ignored. In the dtype of the logits; float32 at least with a chunk_size.

    Raises:
        ConfigurationError: an option is out of range, or a chunk_size with other arrays than torch's.
        ValueError: the shapes do not fit; on the CPU also: a target is no class. Where it cannot be seen, inside
            `jax.jit` or on jax's accelerators, the loss is nan instead.
        TypeError: the targets are not whole numbers.
    """
    if label_smoothing != 0.0 or z_loss != 0.0 or chunk_size is not None:
        _check_options(label_smoothing, ignore_index, z_loss, chunk_size)
    # the usual case is left to torch, whose own checks of it are explained below: ours cost a sixth of a small loss
    usual = logits.ndim == 2 and targets.ndim == 1 and targets.dtype is torch.int64 and chunk_size is None
    if not usual:
        if not isinstance(logits, Tensor):
            return _cross_entropy_on_arrays(logits, targets, label_smoothing, ignore_index, z_loss, chunk_size)
        targets = _class_indices("cross_entropy", logits, targets)
    try:
        if chunk_size is not None:
            return chunked_cross_entropy(
                logits,
                targets,
                chunk_size=chunk_size,
                label_smoothing=label_smoothing,
                ignore_index=ignore_index,
                z_loss=z_loss,
            )
        rows, labels = logits, targets
        if not usual:
            rows, labels = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        loss = F.cross_entropy(rows, labels, ignore_index=ignore_index, label_smoothing=label_smoothing)
    except (TypeError, ValueError, IndexError, RuntimeError):
        _check_options(label_smoothing, ignore_index, z_loss, chunk_size)
        _explain("cross_entropy", logits, targets, ignore_index)
        raise
    if z_loss:
        counted = targets != ignore_index
        # wide: squares soon leave the range of fp16
        squares = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square()
        loss = loss + z_loss * torch.where(counted, squares, 0.0).sum() / counted.sum()
    return loss


def focal_loss(
    logits: Array,
    targets: Array,
    *,
    gamma: float = 2.0,
    alpha: float | Array | None = None,
    ignore_index: int = -100,
) -> Array:
    """Mean of `-alpha (1 - p) ** gamma log p`, where p is the target's probability, in nats.

    Source: Lin et al. 2017, eq. 4 and 5, over many classes; the mean is over the targets that are not ignored.

    Args:
        logits: shape (..., classes).
        targets: class indices, shape (...).
        gamma: how much less a target counts that is well predicted; with 0 it is the cross entropy.
        alpha: weight of all targets, above 0 and up to 1, or of each class, shape (classes,); it does not divide the
            mean.
        ignore_index: targets of this value count neither for the sum nor for the mean.

    Returns:
        Scalar, in float32 at least; nan where every target is ignored.

    Raises:
        ConfigurationError: an option is out of range or of the wrong shape.
        ValueError: the shapes do not fit; on the CPU also: a target is no class. Where it cannot be seen, as by
            `cross_entropy`, the loss is nan instead.
        TypeError: the targets are not whole numbers.
    """
    if gamma != 2.0:
        require("focal_loss", "gamma", gamma, *_NOT_NEGATIVE)
    if not isinstance(logits, Tensor):
        _check_ignore_index("focal_loss", ignore_index)
        targets = on_arrays.class_indices("focal_loss", logits, targets, ignore_index)
        _check_alpha(logits, alpha)
        return on_arrays.focal_loss(logits, targets, gamma=gamma, alpha=alpha, ignore_index=ignore_index)
    targets = _class_indices("focal_loss", logits, targets)
    if alpha is not None:
        _check_alpha(logits, alpha)
    rows, labels = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    try:
        nats = F.cross_entropy(rows, labels, ignore_index=ignore_index, reduction="none")
    except (TypeError, IndexError):
        _check_ignore_index("focal_loss", ignore_index)
        _explain("focal_loss", logits, targets, ignore_index)
        raise
    nats = nats.to(torch.promote_types(nats.dtype, torch.float32))
    # 1 - p, at least the smallest normal number: the power's derivative is infinite at 0 where gamma is below 1
    missing = (-torch.expm1(-nats)).clamp_min(torch.finfo(nats.dtype).tiny)
    losses = missing**gamma * nats
    counted = labels != ignore_index
    if isinstance(alpha, Tensor):
        losses = losses * alpha.to(losses.dtype)[torch.where(counted, labels, 0)]
    elif alpha is not None:
        losses = losses * alpha
    return torch.where(counted, losses, 0.0).sum() / counted.sum()


def bce_with_logits(logits: Array, targets: Array) -> Array:
    """Mean of `-t log sigmoid(x) - (1 - t) log(1 - sigmoid(x))`, in nats.

    Args:
        logits: any shape.
        targets: probabilities from 0 to 1, of the logits' shape, floating point.

    Raises:
        ValueError: the shapes differ.
        TypeError: the targets are no floating point numbers.
    """
    check_same_shape("bce_with_logits", "logits", logits, targets)
    if isinstance(logits, Tensor):
        return F.binary_cross_entropy_with_logits(logits, targets)
    return on_arrays.bce_with_logits(logits, targets)


def _check_options(label_smoothing: Any, ignore_index: Any, z_loss: Any, chunk_size: Any) -> None:
    place = "cross_entropy"
    require(place, "label_smoothing", label_smoothing, lambda part: 0.0 <= part <= 1.0, "a number from 0 to 1")
    require(place, "z_loss", z_loss, *_NOT_NEGATIVE)
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise ConfigurationError(
            f"{place}(chunk_size={chunk_size!r}): needs a whole number of classes, at least 1; or None"
        )
    _check_ignore_index(place, ignore_index)


def _check_alpha(logits: Array, alpha: Any) -> None:
    if isinstance(alpha, Tensor) or (not isinstance(logits, Tensor) and is_array(alpha) and alpha.ndim):
        namespace(logits, alpha, place="focal_loss")
        if alpha.shape != logits.shape[-1:]:
            raise ConfigurationError(
                f"focal_loss(alpha of shape {tuple(alpha.shape)}): needs a weight for each of the "
                f"{logits.shape[-1]} classes, shape ({logits.shape[-1]},)"
            )
    elif alpha is not None:
        needs = "a number above 0 and up to 1, or a tensor of shape (classes,)"
        require("focal_loss", "alpha", alpha, lambda weight: 0.0 < weight <= 1.0, needs)


def _check_ignore_index(place: str, ignore_index: Any) -> None:
    # a numpy integer is Integral too, and good enough for torch
    if type(ignore_index) is not int and (isinstance(ignore_index, bool) or not isinstance(ignore_index, Integral)):
        raise ConfigurationError(f"{place}(ignore_index={ignore_index!r}): needs a whole number, such as -100")


def _cross_entropy_on_arrays(
    logits: Array, targets: Array, label_smoothing: float, ignore_index: int, z_loss: float, chunk_size: int | None
) -> Array:
    _check_options(label_smoothing, ignore_index, z_loss, chunk_size)
    targets = on_arrays.class_indices("cross_entropy", logits, targets, ignore_index)
    if chunk_size is not None:
        raise ConfigurationError(
            f"cross_entropy(chunk_size={chunk_size}): for torch tensors alone; leave it out, jax.jit fuses the softmax "
            "with its sum by itself"
        )
    return on_arrays.cross_entropy(
        logits, targets, label_smoothing=label_smoothing, ignore_index=ignore_index, z_loss=z_loss
    )


def _class_indices(place: str, logits: Tensor, targets: Tensor) -> Tensor:
    """The targets as int64, once they fit."""
    if targets.dtype is not torch.int64 or targets.shape != logits.shape[:-1] or not logits.ndim:
        namespace(logits, targets, place=place)
        check_classes_last(place, logits, targets)
        return targets.long()
    return targets


def _explain(place: str, logits: Tensor, targets: Tensor, ignore_index: int) -> None:
    """Say what made torch fail: shapes, or a label where that was on the CPU, for accelerators answer no more then."""
    namespace(logits, targets, place=place)
    _class_indices(place, logits, targets)
    if targets.device.type == "cpu":
        check_labels(place, logits, targets, ignore_index)
