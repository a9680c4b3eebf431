"""Losses over classes: one of many (cross entropy, focal loss), or several independent ones (binary cross entropy)."""

from __future__ import annotations

import math
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor

from pulsetrain.engine.arrays import Array, at_least_float32, is_array, log_sigmoid, namespace
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import on_arrays
from pulsetrain.engine.losses.checks import check_labels
from pulsetrain.engine.losses.chunked import chunked_cross_entropy
from pulsetrain.engine.losses.shapes import SHARE, check_classes_last, check_same_shape, require

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

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))  # log 4
    tensor(1.3863)
    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, -100]), label_smoothing=0.1)
    tensor(1.3863)

    Args:
        logits: shape (..., classes).
        targets: class indices, shape (...).
        label_smoothing: the share of each target that is spread over all classes, from 0 to 1.
        ignore_index: targets with this value count neither in the sum nor in the mean.
        z_loss: weight of the mean of `logsumexp(logits) ** 2`, which keeps logits from drifting (Chowdhery et al. 2022,
            section 5).
        chunk_size: process this many classes at a time (8192, say), in float32 at least. The forward pass then
            allocates no second tensor of the logits' size, and the backward pass only their gradient; the loss has no
            second derivative. To avoid the logits altogether, see `torch.nn.functional.linear_cross_entropy`.

    Returns:
        Scalar; nan if every target is ignored. In the dtype of the logits; float32 at least with a chunk_size.

    Raises:
        ConfigurationError: an option is out of range, or chunk_size is given for arrays other than torch tensors.
        ValueError: the shapes do not fit; on the CPU also: a target is not a class. Where the values cannot be seen,
            inside `jax.jit` or on jax's accelerators, the loss is nan instead.
        TypeError: the targets are not whole numbers.
    """
    if label_smoothing != 0.0 or z_loss != 0.0 or chunk_size is not None:
        _check_options(label_smoothing, ignore_index, z_loss, chunk_size)
    # The usual case relies on torch's own checks, which `_explain` turns into our messages: our checks would take a
    # sixth of the time of a small loss.
    usual = logits.ndim == 2 and targets.ndim == 1 and targets.dtype is torch.int64 and chunk_size is None
    if not usual:
        if not isinstance(logits, Tensor):
            _check_options(label_smoothing, ignore_index, z_loss, chunk_size)
            targets = on_arrays.class_indices("cross_entropy", logits, targets, ignore_index)
            if chunk_size is not None:
                raise ConfigurationError(
                    "only works for torch tensors; leave it out, jax.jit fuses the softmax with its sum anyway",
                    "cross_entropy",
                    chunk_size=chunk_size,
                )
            return on_arrays.cross_entropy(logits, targets, label_smoothing, ignore_index, z_loss)
        targets = _class_indices("cross_entropy", logits, targets)
    try:
        if chunk_size is not None:
            return chunked_cross_entropy(logits, targets, chunk_size, label_smoothing, ignore_index, z_loss)
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
        # in float32: squares soon overflow fp16
        squares = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square()
        loss = loss + z_loss * torch.where(counted, squares, 0.0).sum() / counted.sum()
    return loss


def focal_loss(
    logits: Array, targets: Array, *, gamma: float = 2.0, alpha: float | Array | None = None, ignore_index: int = -100
) -> Array:
    """Mean of `-alpha (1 - p) ** gamma log p`, where p is the target's probability, in nats.

    Source: Lin et al. 2017, eq. 4 and 5, for many classes; the mean is over the targets that are not ignored.

    >>> focal_loss(torch.zeros(1, 2), torch.tensor([1]), gamma=2.0)  # log(2) / 4
    tensor(0.1733)

    Args:
        logits: shape (..., classes).
        targets: class indices, shape (...).
        gamma: reduces the weight of well-predicted targets; 0 gives the cross entropy.
        alpha: the weight of all targets, above 0 and up to 1, or of each class, shape (classes,). The mean is not
            divided by it.
        ignore_index: targets with this value count neither in the sum nor in the mean.

    Returns:
        Scalar, in float32 at least; nan if every target is ignored.

    Raises:
        ConfigurationError: an option is out of range or has the wrong shape.
        ValueError: the shapes do not fit; on the CPU also: a target is not a class. Where the values cannot be seen
            (see `cross_entropy`), the loss is nan instead.
        TypeError: the targets are not whole numbers.
    """
    if gamma != 2.0:
        require("focal_loss", "gamma", gamma, *_NOT_NEGATIVE)
    if not isinstance(logits, Tensor):
        _check_ignore_index("focal_loss", ignore_index)
        targets = on_arrays.class_indices("focal_loss", logits, targets, ignore_index)
        _check_alpha(logits, alpha)
        return on_arrays.focal_loss(logits, targets, gamma, alpha, ignore_index)
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
    # 1 - p, at least the smallest normal number: for gamma below 1 the derivative of the power is infinite at 0
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

    >>> bce_with_logits(torch.zeros(3), torch.tensor([0.0, 1.0, 0.5]))  # log 2
    tensor(0.6931)

    Args:
        logits: any shape.
        targets: probabilities from 0 to 1, floating point, the shape of the logits.

    Raises:
        ValueError: the shapes differ.
        TypeError: the targets are not floating point numbers.
    """
    check_same_shape("bce_with_logits", "logits", logits, targets)
    if isinstance(logits, Tensor):
        return F.binary_cross_entropy_with_logits(logits, targets)
    namespace(logits, targets, place="bce_with_logits")
    x, t = at_least_float32(logits), at_least_float32(targets)
    return on_arrays.mean_as((1 - t) * x - log_sigmoid(x), logits, targets)


def _check_options(label_smoothing: float, ignore_index: object, z_loss: float, chunk_size: int | None) -> None:
    place = "cross_entropy"
    require(place, "label_smoothing", label_smoothing, *SHARE)
    require(place, "z_loss", z_loss, *_NOT_NEGATIVE)
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise ConfigurationError("needs a whole number of classes, at least 1; or None", place, chunk_size=chunk_size)
    _check_ignore_index(place, ignore_index)


def _check_alpha(logits: Array, alpha: Array) -> None:
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


def _check_ignore_index(place: str, ignore_index: object) -> None:
    # torch accepts numpy integers, which are Integral too
    if type(ignore_index) is not int and (isinstance(ignore_index, bool) or not isinstance(ignore_index, Integral)):
        raise ConfigurationError("needs a whole number, such as -100", place, ignore_index=ignore_index)


def _class_indices(place: str, logits: Tensor, targets: Tensor) -> Tensor:
    """The targets as int64, after a check of shapes and dtypes."""
    if targets.dtype is not torch.int64 or targets.shape != logits.shape[:-1] or not logits.ndim:
        namespace(logits, targets, place=place)
        check_classes_last(place, logits, targets)
        return targets.long()
    return targets


def _explain(place: str, logits: Tensor, targets: Tensor, ignore_index: int) -> None:
    """Raises an error that says why torch failed: shapes, or on the CPU a label; after a failure a GPU is unusable."""
    namespace(logits, targets, place=place)
    _class_indices(place, logits, targets)
    if targets.device.type == "cpu":
        check_labels(place, logits, targets, ignore_index)
