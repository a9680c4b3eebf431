"""The losses by their formulas, on arrays of any library. Torch tensors take torch's kernels instead."""

from __future__ import annotations

from typing import Any

from pulsetrain.engine.arrays import (
    Array,
    at_least_float32,
    is_array,
    is_floating,
    log_sigmoid,
    log_softmax,
    logsumexp,
    masked_mean,
    namespace,
    on_host,
    take_last,
)
from pulsetrain.engine.losses.checks import check_labels
from pulsetrain.engine.losses.shapes import check_classes_last

__all__ = ["bce_with_logits", "class_indices", "cross_entropy", "focal_loss", "huber", "l1", "mse"]


def class_indices(place: str, logits: Array, targets: Array, ignore_index: int) -> Array:
    """The targets as whole numbers with a sign, once they fit; of any integer dtype, for jax has no int64 by default.

    Raises:
        ValueError: the shapes do not fit; or a target is no class, where that can be seen: outside `jax.jit`, on the
            CPU.
        TypeError: the targets are not whole numbers, or the logits are.
    """
    xp = namespace(logits, targets, place=place)
    if logits.ndim == 0 or targets.shape != logits.shape[:-1]:
        check_classes_last(place, logits, targets)
    if not xp.isdtype(targets.dtype, "integral"):
        raise TypeError(f"{place}(targets of {targets.dtype}): needs class indices; pass targets.astype('int32')")
    if not is_floating(logits):
        raise TypeError(f"{place}(logits of {logits.dtype}): needs floating point numbers")
    if on_host(targets):
        check_labels(place, logits, targets, ignore_index)
    return xp.astype(targets, xp.asarray(0).dtype, copy=False)  # jax would wrap -100 round in an unsigned type


def cross_entropy(logits: Array, targets: Array, *, label_smoothing: float, ignore_index: int, z_loss: float) -> Array:
    """`pulsetrain.engine.losses.cross_entropy` of checked arguments; computed in float32 at least."""
    xp = namespace(logits, targets)
    wide = at_least_float32(logits)
    nats, counted = _nats(wide, targets, ignore_index, float(label_smoothing))
    loss = xp.astype(masked_mean(nats, counted), logits.dtype, copy=False)
    if z_loss:
        loss = loss + float(z_loss) * masked_mean(logsumexp(wide) ** 2, counted)
    return loss


def focal_loss(logits: Array, targets: Array, *, gamma: float, alpha: Array | None, ignore_index: int) -> Array:
    """`pulsetrain.engine.losses.focal_loss` of checked arguments."""
    xp = namespace(logits, targets)
    nats, counted = _nats(at_least_float32(logits), targets, ignore_index)
    # 1 - p, at least the smallest normal number: the power's derivative is infinite at 0 where gamma is below 1
    smallest = float(xp.finfo(nats.dtype).smallest_normal)
    missing = -xp.expm1(-nats)
    missing = xp.where(missing < smallest, smallest, missing)
    losses = missing ** float(gamma) * nats
    if alpha is not None and is_array(alpha) and alpha.ndim:
        losses = losses * xp.astype(xp.asarray(alpha), losses.dtype)[xp.where(counted, targets, 0)]
    elif alpha is not None:
        losses = losses * float(alpha)
    return masked_mean(losses, counted)


def bce_with_logits(logits: Array, targets: Array) -> Array:
    """`pulsetrain.engine.losses.bce_with_logits` of checked arguments."""
    namespace(logits, targets, place="bce_with_logits")
    x, t = at_least_float32(logits), at_least_float32(targets)
    return _mean((1 - t) * x - log_sigmoid(x), logits, targets)


def mse(predictions: Array, targets: Array) -> Array:
    """`pulsetrain.engine.losses.mse` of checked arguments."""
    return _mean(_errors("mse", predictions, targets) ** 2, predictions, targets)


def l1(predictions: Array, targets: Array) -> Array:
    """`pulsetrain.engine.losses.l1` of checked arguments."""
    return _mean(abs(_errors("l1", predictions, targets)), predictions, targets)


def huber(predictions: Array, targets: Array, *, delta: float) -> Array:
    """`pulsetrain.engine.losses.huber` of checked arguments."""
    errors, delta = abs(_errors("huber", predictions, targets)), float(delta)
    xp = namespace(errors)
    small = xp.where(errors <= delta, errors, 0.0)  # else an infinite error times a gradient of 0 gives nan
    return _mean(xp.where(errors <= delta, 0.5 * small**2, delta * (errors - 0.5 * delta)), predictions, targets)


def _nats(wide: Array, targets: Array, ignore_index: int, label_smoothing: float = 0.0) -> tuple[Array, Array]:
    """The cross entropy of each target, and which targets count."""
    xp, classes = namespace(wide, targets), wide.shape[-1]
    log_probabilities = log_softmax(wide)
    known = (targets >= 0) & (targets < classes)
    counted = targets != ignore_index
    nats = -take_last(log_probabilities, xp.where(known, targets, 0))
    if label_smoothing:
        smooth = xp.sum(log_probabilities, axis=-1) * (label_smoothing / classes)
        nats = (1 - label_smoothing) * nats - smooth
    # inside jax.jit nothing else would tell of a label that is no class: jax takes -1 for the last one
    return xp.where(counted & ~known, xp.nan, nats), counted


def _errors(place: str, predictions: Array, targets: Array) -> Array:
    namespace(predictions, targets, place=place)
    return at_least_float32(predictions) - at_least_float32(targets)


def _mean(losses: Array, *given: Any) -> Array:
    """The mean in the dtype that the arguments promote to: a half precision sum would soon overflow."""
    xp = namespace(losses, *given)
    return xp.astype(xp.mean(losses), xp.result_type(*given), copy=False)
