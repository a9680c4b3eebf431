"""Advantages, how much better actions were than expected: over time (GAE), or relative to a group (GRPO and others)."""

from __future__ import annotations

from types import ModuleType

from pulsetrain.engine.argument_checks import check_choice, is_whole
from pulsetrain.engine.arrays import Array, misshapen, namespace
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses.masks import check_same_shapes, constant
from pulsetrain.engine.losses.shapes import SHARE, require

__all__ = ["gae", "gdpo_advantages", "grpo_advantages", "rloo_advantages"]

_EPSILON = 1e-4  # added to divisors, which are 0 where all rewards of a group are equal


def gae(rewards: Array, values: Array, dones: Array, gamma: float = 0.99, lam: float = 0.95) -> tuple[Array, Array]:
    """Generalised advantage estimation, and the returns that train a critic (Schulman et al. 2015, eq. 16).

    `A[t] = d[t] + gamma lam A[t + 1]` with `d[t] = r[t] + gamma v[t + 1] - v[t]`; if the episode ended after step t,
    `A[t] = r[t] - v[t]`. For an episode that was truncated rather than ended, add the value of the state where it was
    cut to its last reward: `r[t] + gamma v(last state)`.

    >>> import torch
    >>> rewards, values, dones = torch.ones(3), torch.zeros(4), torch.tensor([False, False, True])
    >>> advantages, returns = gae(rewards, values, dones, gamma=0.5, lam=1.0)
    >>> advantages
    tensor([1.7500, 1.5000, 1.0000])

    Args:
        rewards: shape (time, ...).
        values: the critic's values, shape (time + 1, ...); the last one belongs to the state after the last step.
            Values after the end of an episode are ignored and may be nan.
        dones: true if the episode ended after that step, shape (time, ...); numbers are accepted, 0 meaning false.
        gamma: the discount of a reward for each step, from 0 to 1.
        lam: from 0 (the critic's estimate alone: biased) to 1 (the rewards alone: high variance).

    Returns:
        Advantages and returns (advantages + values), each of shape (time, ...), in float32 at least, without a
        gradient.

    Raises:
        ConfigurationError: gamma or lam is not a number from 0 to 1.
        ValueError: the shapes do not fit.
    """
    place = "gae"
    require(place, "gamma", gamma, *SHARE)
    require(place, "lam", lam, *SHARE)
    xp = namespace(rewards, values, dones, place=place)
    check_same_shapes(place, rewards=rewards, dones=dones)
    if not rewards.ndim or tuple(values.shape) != (rewards.shape[0] + 1, *rewards.shape[1:]):
        needs = "needs rewards (time, ...) and values (time + 1, ...), the last one for the state after the last step"
        raise misshapen(place, needs, rewards=rewards, values=values)
    expected, ended = constant(values), dones != 0
    following = xp.where(ended, 0.0, expected[1:])
    advantages = constant(rewards) + float(gamma) * following - expected[:-1]
    # A doubling scan: after round n each sum covers 2**n steps. It takes log2(time) operations on whole arrays instead
    # of `time` small ones, which jax.jit would have to unroll.
    weight = xp.where(ended, 0.0, xp.full_like(advantages, float(gamma) * float(lam)))
    length, reach = rewards.shape[0], 1
    while reach < length:
        later = xp.where(weight[:-reach] == 0, 0.0, advantages[reach:])  # nothing crosses an end, not even nan
        added = xp.concat([weight[:-reach] * later, xp.zeros_like(advantages[-reach:])], axis=0)
        weight = xp.concat([weight[:-reach] * weight[reach:], xp.zeros_like(weight[-reach:])], axis=0)
        advantages, reach = advantages + added, 2 * reach
    return advantages, advantages + expected[:-1]


def grpo_advantages(rewards: Array, group_size: int, scale: str = "group") -> Array:
    """Each reply's reward minus the mean of its group (Shao et al. 2024, section 4.1.2).

    >>> import torch
    >>> grpo_advantages(torch.tensor([1.0, 3.0, 5.0, 5.0]), group_size=2, scale="none")
    tensor([-1.,  1.,  0.,  0.])

    Args:
        rewards: one per reply, shape (prompts * group_size,); the replies to a prompt are consecutive.
        group_size: replies per prompt, at least 2.
        scale: the divisor: the standard deviation of the "group" or of the whole "batch", plus 1e-4, or "none" (Liu et
            al. 2025: dividing gives more weight to prompts whose rewards differ little). It is the sample standard
            deviation (n - 1), as in TRL.

    Returns:
        Shape (prompts * group_size,), in float32 at least, without a gradient.

    Raises:
        ConfigurationError: group_size is not a whole number of at least 2, or the scale is unknown.
        ValueError: the number of rewards is not a multiple of group_size.
    """
    place = "grpo_advantages"
    xp, groups = _groups(place, rewards, group_size, scale, ("group", "batch", "none"))
    advantages = groups - xp.mean(groups, axis=-1, keepdims=True)
    if scale == "group":
        advantages = advantages / (xp.std(groups, axis=-1, correction=1.0, keepdims=True) + _EPSILON)
    elif scale == "batch":
        advantages = advantages / (xp.std(constant(rewards), correction=1.0) + _EPSILON)
    return xp.reshape(advantages, (-1,))


def rloo_advantages(rewards: Array, group_size: int, scale: str = "none") -> Array:
    """Each reply's reward minus the mean of the others in its group, an unbiased baseline (Ahmadian et al. 2024).

    >>> import torch
    >>> rloo_advantages(torch.tensor([1.0, 3.0, 5.0, 5.0]), group_size=2)
    tensor([-2.,  2.,  0.,  0.])

    Args:
        rewards: one per reply, shape (prompts * group_size,); the replies to a prompt are consecutive.
        group_size: replies per prompt, at least 2.
        scale: "batch" divides by the sample standard deviation of all advantages plus 1e-4, or "none".

    Returns:
        Shape (prompts * group_size,), in float32 at least, without a gradient.

    Raises:
        ConfigurationError: group_size is not a whole number of at least 2, or the scale is unknown.
        ValueError: the number of rewards is not a multiple of group_size.
    """
    place = "rloo_advantages"
    xp, groups = _groups(place, rewards, group_size, scale, ("batch", "none"))
    others = (xp.sum(groups, axis=-1, keepdims=True) - groups) / (group_size - 1)
    advantages = groups - others
    if scale == "batch":
        advantages = advantages / (xp.std(advantages, correction=1.0) + _EPSILON)
    return xp.reshape(advantages, (-1,))


def gdpo_advantages(rewards: Array, weights: Array, group_size: int) -> Array:
    """Advantages from several rewards, each normalised within its group before their weighted sum (Liu et al. 2026).

    A reward of small spread counts as much as one of large spread, and replies with different rewards of an equal sum
    differ. The sum is divided by its standard deviation over the batch. Each division adds 1e-4 to the divisor; the
    standard deviations are those of samples (n - 1), as in TRL.

    >>> import torch
    >>> rewards = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, float("nan")], [1.0, float("nan")]])
    >>> gdpo_advantages(rewards, torch.ones(2), group_size=2)
    tensor([ 0.0000,  0.0000, -1.2245,  1.2245])

    Args:
        rewards: a column per reward, shape (prompts * group_size, rewards); the replies to a prompt are consecutive.
            nan where a reward does not apply: the mean and the standard deviation are those of the others, and it adds
            nothing to the sum.
        weights: one per reward, shape (rewards,).
        group_size: replies per prompt, at least 2.

    Returns:
        Shape (prompts * group_size,), in float32 at least, without a gradient.

    Raises:
        ConfigurationError: group_size is not a whole number of at least 2.
        ValueError: the number of replies is not a multiple of group_size, or the weights do not fit.
    """
    place = "gdpo_advantages"
    _check_group_size(place, group_size)
    xp = namespace(rewards, weights, place=place)
    if rewards.ndim != 2 or tuple(weights.shape) != tuple(rewards.shape[1:]):
        needs = "needs rewards (replies, rewards) and weights (rewards,)"
        raise misshapen(place, needs, rewards=rewards, weights=weights)
    _check_replies(place, rewards, group_size)
    groups = xp.reshape(constant(rewards), (-1, int(group_size), rewards.shape[1]))
    applies = ~xp.isnan(groups)
    largest = xp.max(xp.where(applies, groups, -xp.inf), axis=1, keepdims=True)
    groups = groups - xp.where(largest > -xp.inf, largest, 0.0)  # see `_groups`
    count = xp.sum(xp.astype(applies, groups.dtype), axis=1, keepdims=True)

    def mean(values: Array, divisor: Array) -> Array:
        total = xp.sum(xp.where(applies, values, 0.0), axis=1, keepdims=True)
        return total / xp.where(divisor > 0, divisor, 1.0)

    apart = groups - mean(groups, count)
    spread = xp.sqrt(mean(apart**2, count - 1))
    normal = xp.where(applies, apart / (spread + _EPSILON), 0.0)
    total = xp.sum(normal * constant(weights), axis=-1)
    return xp.reshape((total - xp.mean(total)) / (xp.std(total, correction=1.0) + _EPSILON), (-1,))


def _groups(
    place: str, rewards: Array, group_size: int, scale: str, scales: tuple[str, ...]
) -> tuple[ModuleType, Array]:
    """The functions for the rewards, and these by group, shape (prompts, group_size), as constants.

    The first reward of each group is subtracted from the group, which leaves differences unchanged. Otherwise the mean
    of equal rewards could be rounded, and the rounding error divided by a standard deviation of 0 plus 1e-4.
    """
    _check_group_size(place, group_size)
    check_choice(place, "scale", scale, scales)
    xp = namespace(rewards, place=place)
    if rewards.ndim != 1:
        raise _misfit(place, rewards, group_size)
    _check_replies(place, rewards, group_size)
    groups = xp.reshape(constant(rewards), (-1, int(group_size)))
    return xp, groups - groups[:, :1]


def _check_group_size(place: str, group_size: object) -> None:
    if not is_whole(group_size) or group_size < 2:
        raise ConfigurationError(
            "needs a whole number of replies to each prompt, at least 2: a single reply is always the mean",
            place,
            group_size=group_size,
        )


def _check_replies(place: str, rewards: Array, group_size: int) -> None:
    if rewards.shape[0] % group_size:
        raise _misfit(place, rewards, group_size)


def _misfit(place: str, rewards: Array, group_size: int) -> ValueError:
    return ValueError(
        f"{place}(rewards of shape {tuple(rewards.shape)}, group_size={group_size}): needs one reward for each "
        f"reply, shape (prompts * {group_size},)"
    )
