"""Advantages, how much better actions were than expected: over time (GAE), or relative to a group (GRPO)."""

from __future__ import annotations

from pulsetrain.engine.argument_checks import check_choice, is_whole
from pulsetrain.engine.arrays import Array, misshapen, namespace
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses.masks import check_same_shapes, constant
from pulsetrain.engine.losses.shapes import SHARE, require

__all__ = ["gae", "grpo_advantages"]

_SCALES = ("group", "batch", "none")


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
    if not is_whole(group_size) or group_size < 2:
        raise ConfigurationError(
            "needs a whole number of replies to each prompt, at least 2: a single reply is always the mean",
            place,
            group_size=group_size,
        )
    check_choice(place, "scale", scale, _SCALES)
    xp = namespace(rewards, place=place)
    if rewards.ndim != 1 or rewards.shape[0] % group_size:
        raise ValueError(
            f"{place}(rewards of shape {tuple(rewards.shape)}, group_size={group_size}): needs one reward for each "
            f"reply, shape (prompts * {group_size},)"
        )
    groups = xp.reshape(constant(rewards), (-1, int(group_size)))
    advantages = groups - xp.mean(groups, axis=-1, keepdims=True)
    if scale == "group":
        advantages = advantages / (xp.std(groups, axis=-1, correction=1.0, keepdims=True) + 1e-4)
    elif scale == "batch":
        advantages = advantages / (xp.std(groups, correction=1.0) + 1e-4)
    return xp.reshape(advantages, (-1,))
