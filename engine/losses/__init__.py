"""Losses over tensors of torch and arrays of jax and numpy: classes come last, nothing waits for an accelerator."""

from engine.losses.classification import bce_with_logits, cross_entropy, focal_loss
from engine.losses.registry import Loss, check_first_batch, check_first_loss, get_loss, ignored_label
from engine.losses.regression import huber, l1, mse

__all__ = [
    "Loss",
    "bce_with_logits",
    "check_first_batch",
    "check_first_loss",
    "cross_entropy",
    "focal_loss",
    "get_loss",
    "huber",
    "ignored_label",
    "l1",
    "mse",
]
