"""How much better actions were than expected: estimated over time (GAE), or beside other replies (GRPO)."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from pulsetrain.engine.arrays import Array, namespace
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses.masks import check_choice, check_same_shapes, constant
from pulsetrain.engine.losses.shapes import require

__all__ = ["gae", "grpo_advantages"]

_SCALES = ("group", "batch", "none")


def gae(rewards: Array, values: Array, dones: Array, gamma: float = 0.99, lam: float = 0.95) -> tuple[Array, Array]:
    """Generalised advantage estimation, and the returns that a critic learns from (Schulman et al. 2015, eq. 16).

    `A[t] = d[t] + gamma lam A[t + 1]` with `d[t] = r[t] + gamma v[t + 1] - v[t]`; where the episode ended behind step
    t, `A[t] = r[t] - v[t]`. What an episode that was only cut off might still have earned belongs to its last reward:
    `r[t] + gamma v(where it was cut off)`.

    Args:
        rewards: shape (time, ...).
        values: what the critic says, shape (time + 1, ...); the last is of what follows. Behind an end they may be
            anything, nan too.
        dones: true where the episode ended behind that step, shape (time, ...); or numbers, 0 for false.
        gamma: what a reward of the next step is worth now, from 0 to 1.
        lam: from 0 (what the critic says counts, biased) to 1 (what was earned counts, of great variance).

    Returns:
        Advantages and returns (advantages + values), each of shape (time, ...), in float32 at least, without a
        gradient.

    Raises:
        ConfigurationError: gamma or lam is no number from 0 to 1.
        ValueError: the shapes do not fit.
    """
    place = "gae"
    for argument, value in (("gamma", gamma), ("lam", lam)):
        require(place, argument, value, lambda part: 0.0 <= part <= 1.0, "a number from 0 to 1")
    xp = namespace(rewards, values, dones, place=place)
    check_same_shapes(place, rewards=rewards, dones=dones)
    if not rewards.ndim or tuple(values.shape) != (rewards.shape[0] + 1, *rewards.shape[1:]):
        raise ValueError(
            f"{place}(rewards of shape {tuple(rewards.shape)}, values of shape {tuple(values.shape)}): needs rewards "
            "(time, ...) and values (time + 1, ...), the last one of what follows"
        )
    expected, ended = constant(values), dones != 0
    following = xp.where(ended, 0.0, expected[1:])
    advantages = constant(rewards) + float(gamma) * following - expected[:-1]
    # Each round adds what the sums reach so far to those that end where they begin: log2(time) steps over whole
    # arrays in place of `time` small ones, which jax.jit would have to unroll.
    weight = xp.where(ended, 0.0, xp.full_like(advantages, float(gamma) * float(lam)))
    length, reach = rewards.shape[0], 1
    while reach < length:
        later = xp.where(weight[:-reach] == 0, 0.0, advantages[reach:])  # nothing comes over an end, nan neither
        added = xp.concat([weight[:-reach] * later, xp.zeros_like(advantages[-reach:])], axis=0)
        weight = xp.concat([weight[:-reach] * weight[reach:], xp.zeros_like(weight[-reach:])], axis=0)
        advantages, reach = advantages + added, 2 * reach
    return advantages, advantages + expected[:-1]


def grpo_advantages(rewards: Array, group_size: int, scale: str = "group") -> Array:
    """How much better each reply was than the mean of its group (Shao et al. 2024, section 4.1.2).

    Args:
        rewards: one for each reply, shape (prompts * group_size,); a group is as many one after another.
        group_size: replies to each prompt, at least 2.
        scale: what they are divided by: the standard deviation of the "group" or of the whole "batch", 1e-4 added to
            it, or nothing, "none" (Liu et al. 2025: else prompts weigh more whose rewards differ little). The
            deviations are those of samples, with Bessel's correction (n - 1), as in TRL.

    Returns:
        Shape (prompts * group_size,), in float32 at least, without a gradient.

    Raises:
        ConfigurationError: the group is no whole number of at least 2, or the scale is unknown.
        ValueError: the rewards are no whole groups.
    """
    place = "grpo_advantages"
    _check_group(place, group_size)
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


def _check_group(place: str, group_size: Any) -> None:
    if isinstance(group_size, bool) or not isinstance(group_size, Integral) or group_size < 2:
        raise ConfigurationError(
            f"{place}(group_size={group_size!r}): needs a whole number of replies to each prompt, at least 2: "
            "one alone is always the mean"
        )
