"""The losses written as formulas, for arrays of any library; torch tensors use torch's kernels instead."""

from __future__ import annotations

from pulsetrain.engine.arrays import (
    Array,
    at_least_float32,
    is_array,
    is_floating,
    log_softmax,
    logsumexp,
    masked_mean,
    namespace,
    on_host,
    take_last,
)
from pulsetrain.engine.class_indices import is_integral
from pulsetrain.engine.losses.checks import check_labels
from pulsetrain.engine.losses.shapes import check_classes_last

__all__ = ["class_indices", "cross_entropy", "focal_loss", "mean_as"]


def class_indices(place: str, logits: Array, targets: Array, ignore_index: int) -> Array:
    """The checked targets as signed integers, of any width, since jax has no int64 by default.

    Raises:
        ValueError: the shapes do not fit; outside `jax.jit` and on the CPU also: a target is not a class.
        TypeError: the targets are not whole numbers, or the logits are.
    """
    xp = namespace(logits, targets, place=place)
    if logits.ndim == 0 or targets.shape != logits.shape[:-1]:
        check_classes_last(place, logits, targets)
    if not is_integral(targets):
        raise TypeError(f"{place}(targets of {targets.dtype}): needs class indices; pass targets.astype('int32')")
    if not is_floating(logits):
        raise TypeError(f"{place}(logits of {logits.dtype}): needs floating point numbers")
    if on_host(targets):
        check_labels(place, logits, targets, ignore_index)
    return xp.astype(targets, xp.asarray(0).dtype, copy=False)  # in an unsigned type jax would wrap -100 around


def cross_entropy(logits: Array, targets: Array, label_smoothing: float, ignore_index: int, z_loss: float) -> Array:
    """`pulsetrain.engine.losses.cross_entropy` for arguments that are already checked; computed in float32 at least."""
    xp = namespace(logits, targets)
    wide = at_least_float32(logits)
    nats, counted = _nats(wide, targets, ignore_index, float(label_smoothing))
    loss = xp.astype(masked_mean(nats, counted), logits.dtype, copy=False)
    if z_loss:
        loss = loss + float(z_loss) * masked_mean(logsumexp(wide) ** 2, counted)
    return loss


def focal_loss(logits: Array, targets: Array, gamma: float, alpha: Array | None, ignore_index: int) -> Array:
    """`pulsetrain.engine.losses.focal_loss` for arguments that are already checked."""
    xp = namespace(logits, targets)
    nats, counted = _nats(at_least_float32(logits), targets, ignore_index)
    # 1 - p, at least the smallest normal number: for gamma below 1 the derivative of the power is infinite at 0
    smallest = float(xp.finfo(nats.dtype).smallest_normal)
    missing = -xp.expm1(-nats)
    missing = xp.where(missing < smallest, smallest, missing)
    losses = missing ** float(gamma) * nats
    if alpha is not None and is_array(alpha) and alpha.ndim:
        losses = losses * xp.astype(xp.asarray(alpha), losses.dtype)[xp.where(counted, targets, 0)]
    elif alpha is not None:
        losses = losses * float(alpha)
    return masked_mean(losses, counted)


def _nats(wide: Array, targets: Array, ignore_index: int, label_smoothing: float = 0.0) -> tuple[Array, Array]:
    """The cross entropy of each target, and a mask of the targets that are not ignored."""
    xp, classes = namespace(wide, targets), wide.shape[-1]
    log_probabilities = log_softmax(wide)
    known = (targets >= 0) & (targets < classes)
    counted = targets != ignore_index
    nats = -take_last(log_probabilities, xp.where(known, targets, 0))
    if label_smoothing:
        smooth = xp.sum(log_probabilities, axis=-1) * (label_smoothing / classes)
        nats = (1 - label_smoothing) * nats - smooth
    # inside jax.jit only nan can report a label that is not a class: jax would use -1 as the last class
    return xp.where(counted & ~known, xp.nan, nats), counted


def mean_as(losses: Array, *given: Array) -> Array:
    """The mean, cast to the dtype that the arguments promote to; a half-precision sum would soon overflow."""
    xp = namespace(losses, *given)
    return xp.astype(xp.mean(losses), xp.result_type(*given), copy=False)
