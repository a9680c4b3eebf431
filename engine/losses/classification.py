"""Losses over classes: one of many (cross entropy), or yes and no each (binary cross entropy)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.losses.shapes import check_same_shape

__all__ = ["bce_with_logits", "cross_entropy"]

_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0
) -> Tensor:
    """Mean of `-log softmax(logits)[target]` over the targets that are not ignored, in nats.

    Args:
        logits: shape (..., classes).
        targets: class indices, shape (...).
        label_smoothing: the part of each target that is spread over all classes, from 0 to 1.
        ignore_index: targets of this value count neither for the sum nor for the mean.
        z_loss: weight of the mean of `logsumexp(logits) ** 2`, which keeps logits from drifting (Chowdhery et al. 2022,
            section 5).

    Returns:
        Scalar; nan where every target is ignored.

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
            f"cross_entropy(logits of shape {tuple(logits.shape)}, targets of shape {tuple(targets.shape)}): "
            f"needs logits (..., classes) and targets (...){hint}"
        )
    if targets.dtype is not torch.int64:
        if targets.dtype not in _INDEX_DTYPES:
            raise TypeError(f"cross_entropy(targets of {targets.dtype}): needs class indices; pass targets.long()")
        targets = targets.long()
    if logits.ndim != 2:
        logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    loss = F.cross_entropy(logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if z_loss:
        counted = targets != ignore_index
        squares = logits.float().logsumexp(-1).square()  # float: squares soon leave the range of fp16
        loss = loss + z_loss * torch.where(counted, squares, 0.0).sum() / counted.sum()
    return loss


def bce_with_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of `-t log sigmoid(x) - (1 - t) log(1 - sigmoid(x))`, in nats.

    Args:
        logits: any shape.
        targets: probabilities from 0 to 1, of the logits' shape, floating point.

    Raises:
        ValueError: the shapes differ.
        TypeError: the targets are no floating point numbers.
    """
    check_same_shape("bce_with_logits", "logits", logits, targets)
    return F.binary_cross_entropy_with_logits(logits, targets)
