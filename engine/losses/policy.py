"""Losses that train a policy on its own samples (PPO, GRPO), and the KL and clipping statistics reported with them."""

from __future__ import annotations

import math
from numbers import Real
from types import ModuleType

from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.arrays import Array, at_least_float32, is_array, misshapen, namespace, stop_gradient
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses.masks import check_mask, check_same_shapes, constant, mean_of, zero_outside
from pulsetrain.engine.losses.shapes import require

__all__ = ["clip_fraction", "grpo_loss", "kl_estimate", "mean_over_replies", "ppo_policy_loss", "ppo_value_loss"]

_ESTIMATORS = ("k1", "k2", "k3")
_NORMALIZATIONS = ("sequence_mean", "token_mean", "dr_grpo")
_RATIOS = ("token", "sequence", "product")
_OBJECTIVES = ("clip", "cispo")


def ppo_policy_loss(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    clip_range: float | Array = 0.2,
    mask: Array | None = None,
    clip_range_high: float | None = None,
) -> Array:
    """Clipped surrogate objective: the mean of `max(-A r, -A clip(r, 1 - clip_range, 1 + clip_range_high))`.

    r = exp(log_probs - old_log_probs) is how much likelier an action has become since it was sampled. Where r is
    clipped, the gradient is 0. Source: Schulman et al. 2017, eq. 7; two ranges: Yu et al. 2025, "clip-higher".

    >>> import torch
    >>> old, advantages = torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0])
    >>> ppo_policy_loss(old, old, advantages)  # r = 1
    tensor(-1.)
    >>> ppo_policy_loss(old + 0.5, old, advantages, clip_range=0.2)  # r = 1.65, clipped to 1.2
    tensor(-1.2000)

    Args:
        log_probs: log-probabilities of the actions taken, any shape, nats; for text, tokens are actions.
        old_log_probs: the same under the policy that took the actions, same shape.
        advantages: the same shape, or with size 1 in dimensions that share an advantage: (batch, 1) with (batch,
            length).
        clip_range: how far r may fall; an array of shape () where it follows a schedule, which is not checked.
        mask: true where an action counts; values elsewhere are ignored and may be nan.
        clip_range_high: how far r may rise; None means clip_range.

    Returns:
        Scalar, in float32 at least; nan if the mask is nowhere true. Only log_probs receive a gradient.

    Raises:
        ConfigurationError: a range is not a number of at least 0.
        ValueError: the shapes do not fit.
        TypeError: the mask is not boolean.
    """
    place = "ppo_policy_loss"
    low, high = _ranges(place, clip_range, clip_range_high)
    xp = _checked(place, log_probs, old_log_probs, advantages, mask)
    if advantages.ndim != log_probs.ndim or any(
        each not in (1, length) for each, length in zip(advantages.shape, log_probs.shape, strict=True)
    ):
        needs = "needs an advantage for each, or size 1 in a dimension that shares one"
        raise misshapen(place, needs, log_probs=log_probs, advantages=advantages)
    wide = xp.broadcast_to(constant(advantages), tuple(log_probs.shape))
    return mean_of(_surrogate(_log_ratio(log_probs, old_log_probs, mask), zero_outside(wide, mask), low, high), mask)


def ppo_value_loss(
    values: Array, old_values: Array, returns: Array, clip_range: float | None = None, mask: Array | None = None
) -> Array:
    """Half the mean of `(v - R) ** 2`, or of `max((v - R) ** 2, (clip(v, v_old - c, v_old + c) - R) ** 2)`.

    Source: Schulman et al. 2017, eq. 9; the clipped form is that of the authors' code.

    >>> import torch
    >>> values, old_values, returns = torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([3.0])
    >>> ppo_value_loss(values, old_values, returns), ppo_value_loss(values, old_values, returns, clip_range=1.0)
    (tensor(0.5000), tensor(2.))

    Args:
        values: the critic's current values, any shape.
        old_values: its values when the actions were taken, same shape; unused without a clip_range.
        returns: the targets, same shape.
        clip_range: c, in the unit of the returns; None disables clipping.
        mask: true where a value counts; values elsewhere are ignored and may be nan.

    Returns:
        Scalar, in float32 at least; nan if the mask is nowhere true. Only values receive a gradient.

    Raises:
        ConfigurationError: the range is not a number of at least 0.
        ValueError: the shapes differ.
        TypeError: the mask is not boolean.
    """
    place = "ppo_value_loss"
    if clip_range is not None:
        _check_range(place, "clip_range", clip_range)
    xp = namespace(values, old_values, returns, mask, place=place)
    check_same_shapes(place, values=values, old_values=old_values, returns=returns)
    check_mask(place, "values", values, mask)
    now, target = zero_outside(at_least_float32(values), mask), zero_outside(constant(returns), mask)
    losses = (now - target) ** 2
    if clip_range is not None:
        old, most = zero_outside(constant(old_values), mask), float(clip_range)
        moved = now - old
        clipped = xp.where(moved > most, old + most, xp.where(moved < -most, old - most, now))
        worse = (clipped - target) ** 2
        losses = xp.where(worse > losses, worse, losses)
    return 0.5 * mean_of(losses, mask)


def kl_estimate(log_probs: Array, other_log_probs: Array, estimator: str = "k1") -> Array:
    """KL(p || other) for each sample of p, estimated from the sample's two log-probabilities; the mean is the estimate.

    - "k1": `log p - log other`, unbiased, of either sign;
    - "k2": half its square, biased, with low variance;
    - "k3": `other / p - 1 - log(other / p)`, unbiased, never negative, with low variance.

    Source: Schulman 2020, "Approximating KL divergence". As losses, only k2 has the gradient of the KL in expectation,
    and only on fresh samples; the expected gradient of k1 is 0, and that of k3 differs.

    >>> import torch
    >>> p, other = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.5])
    >>> kl_estimate(p, other, "k1"), kl_estimate(p, other, "k3")
    (tensor([ 0.5000, -0.5000]), tensor([0.1065, 0.1487]))

    Args:
        log_probs: log-probabilities under p, which drew the samples, any shape, nats.
        other_log_probs: log-probabilities under the other distribution, same shape.

    Returns:
        The same shape, in float32 at least.

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
    *,
    ratio: str = "token",
    objective: str = "clip",
) -> Array:
    """Group relative policy optimisation and its family: a loss per token, with the advantage of the token's reply.

    The ratio r says how much likelier a token has become since it was sampled:

    - "token": its own, `exp(log_probs - old_log_probs)` (Shao et al. 2024);
    - "sequence": the geometric mean of the ratios of its reply's tokens (GSPO: Zheng et al. 2025, eq. 7);
    - "product": their product, the ratio of the whole reply as one action (RLOO: Ahmadian et al. 2024). It moves
      quickly with the length of a reply.

    The objective makes the loss of a token, to which `kl_coef * KL` is added, with the k3 estimate of
    KL(policy || reference):

    - "clip": `max(-A r, -A clip(r, 1 - clip_range, 1 + clip_range_high))`, as of `ppo_policy_loss`;
    - "cispo": `-A min(r, 1 + clip_range_high) log_probs`, where the weight has no gradient: a token whose ratio is
      clipped is still learnt from (Chen et al. 2025, eq. 4). There is no lower bound.

    `mean_over_replies` reduces the losses to a scalar by the normalization.

    >>> import torch
    >>> log_probs, mask = torch.full((2, 3), -1.0), torch.tensor([[True, True, True], [True, False, False]])
    >>> advantages = torch.tensor([1.0, -2.0])
    >>> grpo_loss(log_probs, log_probs, advantages, mask)  # mean of -1 and 2
    tensor(0.5000)
    >>> grpo_loss(log_probs, log_probs, advantages, mask, normalization="token_mean")  # mean of -1, -1, -1 and 2
    tensor(-0.2500)
    >>> old = log_probs - torch.tensor([[0.3, 0.0, 0.0], [0.0, 0.0, 0.0]])
    >>> grpo_loss(log_probs, old, advantages, mask, ratio="sequence")  # mean of -exp(0.1) and 2
    tensor(0.4474)

    Args:
        log_probs: log-probabilities of the tokens of each reply, shape (batch, length), nats.
        old_log_probs: the same under the policy that sampled them, same shape.
        advantages: one per reply, shape (batch,); see `grpo_advantages`.
        mask: true where a token belongs to the reply, shape (batch, length); values elsewhere are ignored and may be
            nan.
        clip_range: how far the ratio may fall; unused by "cispo".
        clip_range_high: how far the ratio may rise; None means clip_range.
        normalization: "sequence_mean", "token_mean" or "dr_grpo", see `mean_over_replies`.
        max_length: the longest reply that could have been sampled, in tokens; required by "dr_grpo".
        reference_log_probs: the same under the reference model, same shape; required by a kl_coef above 0.

    Returns:
        Scalar, in float32 at least; a reply without tokens adds 0. Only log_probs receive a gradient.

    Raises:
        ConfigurationError: an option is out of range, unknown or missing.
        ValueError: the shapes do not fit.
        TypeError: the mask is not boolean.
    """
    place = "grpo_loss"
    low, high = _ranges(place, clip_range, clip_range_high)
    check_choice(place, "ratio", ratio, _RATIOS)
    check_choice(place, "objective", objective, _OBJECTIVES)
    _check_normalization(place, normalization, max_length)
    _check_range(place, "kl_coef", kl_coef)
    if kl_coef and reference_log_probs is None:
        raise ConfigurationError("needs reference_log_probs; pass them, or kl_coef=0.0", place, kl_coef=kl_coef)
    namespace(log_probs, advantages, place=place)  # arrays
    if log_probs.ndim != 2 or tuple(advantages.shape) != (log_probs.shape[0],):
        needs = "needs log_probs (batch, length) and advantages (batch,)"
        raise misshapen(place, needs, log_probs=log_probs, advantages=advantages)
    xp = _checked(place, log_probs, old_log_probs, advantages, mask, reference_log_probs)
    advantage = zero_outside(xp.broadcast_to(constant(advantages)[:, None], tuple(log_probs.shape)), mask)
    log_ratio = _of_reply(_log_ratio(log_probs, old_log_probs, mask), mask, ratio)
    policy = zero_outside(at_least_float32(log_probs), mask)
    if objective == "cispo":
        most = _log(1 + high)
        weight = stop_gradient(xp.exp(xp.where(log_ratio > most, most, log_ratio)))
        losses = -advantage * weight * policy
    else:
        losses = _surrogate(log_ratio, advantage, low, high)
    if kl_coef:
        losses = losses + float(kl_coef) * kl_estimate(policy, zero_outside(constant(reference_log_probs), mask), "k3")
    return _reduced(losses, mask, normalization, max_length)


def mean_over_replies(
    values: Array, mask: Array, normalization: str = "sequence_mean", max_length: int | None = None
) -> Array:
    """A scalar from a value per token of several replies.

    - "sequence_mean": the mean over replies of the mean over their tokens (Shao et al. 2024, eq. 3);
    - "token_mean": the mean over all tokens, so long replies weigh more (Yu et al. 2025);
    - "dr_grpo": the sum divided by batch times max_length, which favours no length (Liu et al. 2025).

    >>> import torch
    >>> values, mask = torch.tensor([[1.0, 3.0], [4.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    >>> mean_over_replies(values, mask), mean_over_replies(values, mask, "dr_grpo", max_length=4)
    (tensor(3.), tensor(1.))

    Args:
        values: shape (batch, length).
        mask: true where a token belongs to a reply, same shape; values elsewhere are ignored and may be nan.
        max_length: the longest reply that could have been sampled, in tokens; required by "dr_grpo".

    Returns:
        Scalar, in float32 at least; a reply without tokens adds 0.

    Raises:
        ConfigurationError: the normalization is unknown, or max_length is out of range or missing.
        ValueError: the shapes do not fit.
        TypeError: the mask is not boolean.
    """
    place = "mean_over_replies"
    _check_normalization(place, normalization, max_length)
    namespace(values, mask, place=place)
    if values.ndim != 2:
        raise misshapen(place, "needs values (batch, length)", values=values)
    check_mask(place, "values", values, mask)
    return _reduced(zero_outside(at_least_float32(values), mask), mask, normalization, max_length)


def clip_fraction(
    log_probs: Array,
    old_log_probs: Array,
    clip_range: float | Array,
    mask: Array | None = None,
    clip_range_high: float | None = None,
    *,
    ratio: str = "token",
) -> Array:
    """The share of the ratios `exp(log_probs - old_log_probs)` outside 1 - clip_range .. 1 + clip_range_high.

    Arguments and errors are those of `ppo_policy_loss`; it too is nan if the mask is nowhere true. With a `ratio` of
    "sequence" or "product", each token counts with the ratio of its reply, see `grpo_loss`.

    >>> import torch
    >>> clip_fraction(torch.tensor([-1.0, -1.1, -2.0, -1.0]), torch.full((4,), -1.0), clip_range=0.2)
    tensor(0.2500)

    Returns:
        Scalar from 0 to 1, in float32 at least, without a gradient.
    """
    place = "clip_fraction"
    low, high = _ranges(place, clip_range, clip_range_high)
    check_choice(place, "ratio", ratio, _RATIOS)
    xp = _checked(place, log_probs, old_log_probs, None, mask)
    if ratio != "token" and not log_probs.ndim:
        raise misshapen(place, "needs log_probs (batch, length)", log_probs=log_probs)
    log_ratio = constant(_of_reply(_log_ratio(log_probs, old_log_probs, mask), mask, ratio))
    outside = (log_ratio > _log(1 + high)) | (log_ratio < _log(1 - low))
    return mean_of(xp.astype(outside, log_ratio.dtype), mask)


def _checked(
    place: str, log_probs: Array, old: Array, advantages: Array, mask: Array, reference: Array = None
) -> ModuleType:
    """The functions for the arrays, whose shapes fit except perhaps that of the advantages."""
    xp = namespace(log_probs, old, advantages, mask, reference, place=place)
    check_same_shapes(place, log_probs=log_probs, old_log_probs=old, reference_log_probs=reference)
    check_mask(place, "log_probs", log_probs, mask)
    return xp


def _log_ratio(log_probs: Array, old_log_probs: Array, mask: Array | None) -> Array:
    return zero_outside(at_least_float32(log_probs), mask) - zero_outside(constant(old_log_probs), mask)


def _of_reply(log_ratio: Array, mask: Array | None, ratio: str) -> Array:
    """The log ratio that each token counts with: its own, or that of its reply, the last dimension; 0 outside."""
    if ratio == "token":
        return log_ratio
    xp = namespace(log_ratio)
    total = xp.sum(log_ratio, axis=-1, keepdims=True)
    if ratio == "sequence":
        tokens = xp.ones_like(log_ratio) if mask is None else xp.astype(mask, log_ratio.dtype)
        count = xp.sum(tokens, axis=-1, keepdims=True)
        total = total / xp.where(count > 0, count, 1.0)
    return zero_outside(xp.broadcast_to(total, tuple(log_ratio.shape)), mask)


def _reduced(values: Array, mask: Array, normalization: str, max_length: int | None) -> Array:
    """See `mean_over_replies`; the values are 0 outside the mask."""
    xp = namespace(values)
    if normalization == "dr_grpo" and max_length is not None:
        return xp.sum(values) / (values.shape[0] * float(max_length))
    count = xp.astype(mask, values.dtype)
    if normalization == "token_mean":
        total = xp.sum(count)
        return xp.sum(values) / xp.where(total > 0, total, 1.0)
    count = xp.sum(count, axis=-1)
    return xp.mean(xp.sum(values, axis=-1) / xp.where(count > 0, count, 1.0))


def _check_normalization(place: str, normalization: str, max_length: int | None) -> None:
    check_choice(place, "normalization", normalization, _NORMALIZATIONS)
    if normalization == "dr_grpo" and max_length is None:
        raise ConfigurationError("needs max_length, the longest possible reply", place, normalization=normalization)
    if max_length is not None:
        require(place, "max_length", max_length, lambda most: 0 < most < math.inf, "a number of tokens, at least 1")


def _surrogate(log_ratio: Array, advantages: Array, low: float | Array, high: float | Array) -> Array:
    """`max(-A r, -A clip(r))` of each."""
    xp = namespace(log_ratio, advantages)
    # decided before `exp`: if it overflows, the gradient of a clipped ratio would be 0 times inf
    above = (advantages >= 0) & (log_ratio > _log(1 + high))  # without an advantage too: 0 times inf is nan
    below = (advantages < 0) & (log_ratio < _log(1 - low))
    free = xp.exp(xp.where(above | below, 0.0, log_ratio))
    return -advantages * xp.where(above, 1 + high, xp.where(below, 1 - low, free))


def _log(ratio: float | Array) -> float | Array:
    if not isinstance(ratio, float):
        return namespace(ratio).log(ratio)
    return math.log(ratio) if ratio > 0 else -math.inf


def _ranges(
    place: str, clip_range: float | Array, clip_range_high: float | None
) -> tuple[float | Array, float | Array]:
    high = clip_range if clip_range_high is None else clip_range_high
    for name, value in (("clip_range", clip_range), ("clip_range_high", high)):
        if _is_number(value):
            _check_range(place, name, value)
    low, high = (float(each) if _is_number(each) else each for each in (clip_range, high))
    return low, high


def _is_number(value: object) -> bool:
    """Whether it is checked: an array follows a schedule, and may have no value yet, inside `jax.jit`."""
    return isinstance(value, Real) or not is_array(value)


def _check_range(place: str, argument: str, value: float) -> None:
    require(place, argument, value, lambda most: 0.0 <= most < math.inf, "a number of at least 0")
