"""Losses that train a policy on what it sampled: PPO's and GRPO's, and what is measured beside them."""

from __future__ import annotations

import math
from typing import Any

from pulsetrain.engine.arrays import Array, at_least_float32, namespace
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses.masks import check_choice, check_mask, check_same_shapes, constant, kept, mean_of
from pulsetrain.engine.losses.shapes import require

__all__ = ["clip_fraction", "grpo_loss", "kl_estimate", "ppo_policy_loss", "ppo_value_loss"]

_ESTIMATORS = ("k1", "k2", "k3")
_NORMALIZATIONS = ("sequence_mean", "token_mean", "dr_grpo")


def ppo_policy_loss(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    clip_range: float = 0.2,
    mask: Array | None = None,
    clip_range_high: float | None = None,
) -> Array:
    """Clipped surrogate objective: the mean of `max(-A r, -A clip(r, 1 - clip_range, 1 + clip_range_high))`.

    r = exp(log_probs - old_log_probs) is how much likelier an action has become since it was sampled. Where r is
    clipped the gradient is 0. Source: Schulman et al. 2017, eq. 7; two ranges: Yu et al. 2025, "clip-higher".

    Args:
        log_probs: log-probabilities of the actions taken, any shape, nats; tokens are actions.
        old_log_probs: those by the policy that took them, of the same shape.
        advantages: of the same shape, or with as many dimensions and 1 for some: (batch, 1) beside (batch, length).
        mask: true where an action counts; what lies beside it may be anything, nan too.
        clip_range_high: how far r may rise; clip_range where None.

    Returns:
        Scalar, in float32 at least; nan where the mask is nowhere true. Only log_probs get a gradient.

    Raises:
        ConfigurationError: a range is no number of at least 0.
        ValueError: the shapes do not fit.
        TypeError: the mask is not boolean.
    """
    place = "ppo_policy_loss"
    low, high = _ranges(place, clip_range, clip_range_high)
    xp = namespace(log_probs, old_log_probs, advantages, mask, place=place)
    check_same_shapes(place, log_probs=log_probs, old_log_probs=old_log_probs)
    check_mask(place, "log_probs", log_probs, mask)
    if advantages.ndim != log_probs.ndim or any(
        each not in (1, length) for each, length in zip(advantages.shape, log_probs.shape, strict=True)
    ):
        raise ValueError(
            f"{place}(log_probs of shape {tuple(log_probs.shape)}, advantages of shape {tuple(advantages.shape)}): "
            "needs an advantage for each, or 1 in place of a dimension that shares it"
        )
    wide = xp.broadcast_to(constant(advantages), tuple(log_probs.shape))
    return mean_of(_surrogate(_log_ratio(log_probs, old_log_probs, mask), kept(wide, mask), low, high), mask)


def ppo_value_loss(
    values: Array, old_values: Array, returns: Array, clip_range: float | None = None, mask: Array | None = None
) -> Array:
    """Half the mean of `(v - R) ** 2`, or of `max((v - R) ** 2, (clip(v, v_old - c, v_old + c) - R) ** 2)`.

    Source: Schulman et al. 2017, eq. 9; the clipped one is that of the authors' code.

    Args:
        values: what the critic says now, any shape.
        old_values: what it said when the actions were taken, of the same shape; of no account without a clip_range.
        returns: what it should have said, of the same shape.
        clip_range: c, in the unit of the returns; None clips nothing.
        mask: true where a value counts; what lies beside it may be anything, nan too.

    Returns:
        Scalar, in float32 at least; nan where the mask is nowhere true. Only values get a gradient.

    Raises:
        ConfigurationError: the range is no number of at least 0.
        ValueError: the shapes differ.
        TypeError: the mask is not boolean.
    """
    place = "ppo_value_loss"
    if clip_range is not None:
        _check_range(place, "clip_range", clip_range)
    xp = namespace(values, old_values, returns, mask, place=place)
    check_same_shapes(place, values=values, old_values=old_values, returns=returns)
    check_mask(place, "values", values, mask)
    now, target = kept(at_least_float32(values), mask), kept(constant(returns), mask)
    losses = (now - target) ** 2
    if clip_range is not None:
        old, most = kept(constant(old_values), mask), float(clip_range)
        moved = now - old
        clipped = xp.where(moved > most, old + most, xp.where(moved < -most, old - most, now))
        worse = (clipped - target) ** 2
        losses = xp.where(worse > losses, worse, losses)
    return 0.5 * mean_of(losses, mask)


def kl_estimate(log_probs: Array, other_log_probs: Array, estimator: str = "k1") -> Array:
    """KL(p || other) of each sample of p, estimated from its log-probabilities by both; the mean is the estimate.

    - "k1": `log p - log other`, unbiased, of either sign;
    - "k2": half its square, biased, of little variance;
    - "k3": `other / p - 1 - log(other / p)`, unbiased, never negative, of little variance.

    Source: Schulman 2020, "Approximating KL divergence". As a loss, k3 has another gradient in expectation than the KL
    has, and k1 has none; k2's is the right one, where the samples are fresh.

    Args:
        log_probs: those by p, which the samples are of, any shape, nats.
        other_log_probs: of the same shape.

    Returns:
        Of the same shape, in float32 at least.

    Raises:
        ConfigurationError: the estimator is unknown.
        ValueError: the shapes differ.
    """
    place = "kl_estimate"
    check_choice(place, "estimator", estimator, _ESTIMATORS)
    xp = namespace(log_probs, other_log_probs, place=place)
    check_same_shapes(place, log_probs=log_probs, other_log_probs=other_log_probs)
    difference = at_least_float32(other_log_probs) - at_least_float32(log_probs)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference**2
    return xp.expm1(difference) - difference


def grpo_loss(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    clip_range: float = 0.2,
    clip_range_high: float | None = None,
    normalization: str = "sequence_mean",
    max_length: int | None = None,
    reference_log_probs: Array | None = None,
    kl_coef: float = 0.0,
) -> Array:
    """Group relative policy optimisation: PPO's clipped objective of each token, its reply's advantage its own.

    What is added up over tokens is `max(-A r, -A clip(r)) + kl_coef * KL`, with the estimate k3 of
    KL(policy || reference). Normalization says how:

    - "sequence_mean": the mean over replies of the mean over their tokens (Shao et al. 2024, eq. 3);
    - "token_mean": the mean over all tokens, so that long replies weigh more (Yu et al. 2025);
    - "dr_grpo": the sum divided by batch times max_length, which favours no length (Liu et al. 2025).

    Args:
        log_probs: log-probabilities of the tokens of each reply, shape (batch, length), nats.
        old_log_probs: those by the policy that sampled them, of the same shape.
        advantages: of each reply, shape (batch,); see `grpo_advantages`.
        mask: true where a token is of the reply, shape (batch, length); what lies beside it may be anything, nan too.
        clip_range_high: how far the ratio may rise; clip_range where None.
        max_length: the longest reply that could have been sampled, in tokens; for "dr_grpo", which needs it.
        reference_log_probs: those by the reference model, of the same shape; needed for a kl_coef above 0.

    Returns:
        Scalar, in float32 at least; a reply without tokens adds 0. Only log_probs get a gradient.

    Raises:
        ConfigurationError: an option is out of range, unknown or missing.
        ValueError: the shapes do not fit.
        TypeError: the mask is not boolean.
    """
    place = "grpo_loss"
    low, high = _ranges(place, clip_range, clip_range_high)
    check_choice(place, "normalization", normalization, _NORMALIZATIONS)
    require(place, "kl_coef", kl_coef, lambda weight: 0.0 <= weight < math.inf, "a number of at least 0")
    if normalization == "dr_grpo" and max_length is None:
        raise ConfigurationError(f"{place}(normalization='dr_grpo'): needs max_length, the longest reply there can be")
    if max_length is not None:
        require(place, "max_length", max_length, lambda most: 0 < most < math.inf, "a number of tokens, at least 1")
    if kl_coef and reference_log_probs is None:
        raise ConfigurationError(f"{place}(kl_coef={kl_coef!r}): needs reference_log_probs to keep the policy near to")
    xp = namespace(log_probs, old_log_probs, advantages, mask, reference_log_probs, place=place)
    _check_replies(place, log_probs, old_log_probs, advantages, mask, reference_log_probs)
    advantage = kept(xp.broadcast_to(constant(advantages)[:, None], tuple(log_probs.shape)), mask)
    losses = _surrogate(_log_ratio(log_probs, old_log_probs, mask), advantage, low, high)
    if kl_coef:
        policy = kept(at_least_float32(log_probs), mask)
        losses = losses + float(kl_coef) * kl_estimate(policy, kept(constant(reference_log_probs), mask), "k3")
    if normalization == "dr_grpo" and max_length is not None:
        return xp.sum(losses) / (log_probs.shape[0] * float(max_length))
    count = xp.astype(mask, losses.dtype)
    if normalization == "token_mean":
        total = xp.sum(count)
        return xp.sum(losses) / xp.where(total > 0, total, 1.0)
    count = xp.sum(count, axis=-1)
    return xp.mean(xp.sum(losses, axis=-1) / xp.where(count > 0, count, 1.0))


def clip_fraction(
    log_probs: Array,
    old_log_probs: Array,
    clip_range: float,
    mask: Array | None = None,
    clip_range_high: float | None = None,
) -> Array:
    """The part of the ratios `exp(log_probs - old_log_probs)` that lies outside 1 - clip_range .. 1 + clip_range_high.

    Arguments and errors are those of `ppo_policy_loss`; so is the nan where the mask is nowhere true.

    Returns:
        Scalar from 0 to 1, in float32 at least, without a gradient.
    """
    place = "clip_fraction"
    low, high = _ranges(place, clip_range, clip_range_high)
    xp = namespace(log_probs, old_log_probs, mask, place=place)
    check_same_shapes(place, log_probs=log_probs, old_log_probs=old_log_probs)
    check_mask(place, "log_probs", log_probs, mask)
    log_ratio = constant(_log_ratio(log_probs, old_log_probs, mask))
    outside = (log_ratio > _log(1 + high)) | (log_ratio < _log(1 - low))
    return mean_of(xp.astype(outside, log_ratio.dtype), mask)


def _log_ratio(log_probs: Array, old_log_probs: Array, mask: Array | None) -> Array:
    return kept(at_least_float32(log_probs), mask) - kept(constant(old_log_probs), mask)


def _surrogate(log_ratio: Array, advantages: Array, low: float, high: float) -> Array:
    """`max(-A r, -A clip(r))` of each."""
    xp = namespace(log_ratio, advantages)
    # asked before `exp`: where that overflows, the gradient of what is clipped would else be 0 times inf
    above = (advantages > 0) & (log_ratio > _log(1 + high))
    below = (advantages < 0) & (log_ratio < _log(1 - low))
    free = xp.exp(xp.where(above | below, 0.0, log_ratio))
    return -advantages * xp.where(above, 1 + high, xp.where(below, 1 - low, free))


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def _ranges(place: str, clip_range: Any, clip_range_high: Any) -> tuple[float, float]:
    _check_range(place, "clip_range", clip_range)
    if clip_range_high is None:
        return float(clip_range), float(clip_range)
    _check_range(place, "clip_range_high", clip_range_high)
    return float(clip_range), float(clip_range_high)


def _check_range(place: str, argument: str, value: Any) -> None:
    require(place, argument, value, lambda most: 0.0 <= most < math.inf, "a number of at least 0")


def _check_replies(place: str, log_probs: Array, old: Array, advantages: Array, mask: Array, other: Any) -> None:
    if log_probs.ndim != 2 or tuple(advantages.shape) != (log_probs.shape[0],):
        raise ValueError(
            f"{place}(log_probs of shape {tuple(log_probs.shape)}, advantages of shape {tuple(advantages.shape)}): "
            "needs log_probs (batch, length) and advantages (batch,)"
        )
    check_same_shapes(place, log_probs=log_probs, old_log_probs=old, reference_log_probs=other)
    check_mask(place, "log_probs", log_probs, mask)
