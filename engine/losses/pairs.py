"""Losses over pairs of replies without a reference: SimPO, ORPO, and Bradley and Terry's of rewards."""

from __future__ import annotations

import math

from pulsetrain.engine.arrays import Array, at_least_float32, log_sigmoid, namespace
from pulsetrain.engine.losses.masks import constant
from pulsetrain.engine.losses.preference import check_replies, check_smoothing, smoothed
from pulsetrain.engine.losses.shapes import POSITIVE, require

__all__ = ["bradley_terry_loss", "orpo_loss", "simpo_loss"]

_NOT_NEGATIVE = (lambda value: 0.0 <= value < math.inf), "a finite number of at least 0"


def simpo_loss(
    policy_chosen: Array, policy_rejected: Array, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> Array:
    """Simple preference optimisation: the mean of `-log sigmoid(beta (chosen - rejected) - gamma)`.

    Source: Meng et al. 2024, eq. 6; with label smoothing e, `-(1 - e) log sigmoid(x) - e log sigmoid(-x)`.

    >>> import torch
    >>> simpo_loss(torch.tensor([-1.0]), torch.tensor([-1.5]), beta=2.0, gamma=1.0)  # the margin is reached: log 2
    tensor(0.6931)

    Args:
        policy_chosen: mean log-probability of the tokens of each preferred reply, shape (batch,), nats.
        policy_rejected: the same for the rejected replies.
        beta: scales the rewards.
        gamma: the margin between the two rewards that is aimed at, in nats times beta.
        label_smoothing: the assumed share of pairs whose preference is wrong.

    Returns:
        Scalar, in float32 at least.

    Raises:
        ConfigurationError: an option is out of range.
        ValueError: the shapes differ, or are not (batch,).
    """
    place = "simpo_loss"
    require(place, "beta", beta, *POSITIVE)
    require(place, "gamma", gamma, *_NOT_NEGATIVE)
    check_smoothing(place, label_smoothing)
    check_replies(place, policy_chosen=policy_chosen, policy_rejected=policy_rejected)
    margins = at_least_float32(policy_chosen) - at_least_float32(policy_rejected)
    return namespace(margins).mean(smoothed(float(beta) * margins - float(gamma), float(label_smoothing)))


def orpo_loss(policy_chosen: Array, policy_rejected: Array) -> Array:
    """Odds ratio preference optimisation: the mean of `-log sigmoid(log(odds(chosen) / odds(rejected)))`.

    `odds(p) = p / (1 - p)` of the probability p = exp(log-probability). The strategy adds the cross entropy of the
    preferred replies. Source: Hong et al. 2024, eq. 4 and 7.

    >>> import torch
    >>> orpo_loss(torch.tensor([0.5]).log(), torch.tensor([0.2]).log())  # odds of 1 and 1 / 4
    tensor(0.2231)

    Args:
        policy_chosen: mean log-probability of the tokens of each preferred reply, shape (batch,), nats, at most 0.
        policy_rejected: the same for the rejected replies.

    Returns:
        Scalar, in float32 at least.

    Raises:
        ValueError: the shapes differ, or are not (batch,).
    """
    check_replies("orpo_loss", policy_chosen=policy_chosen, policy_rejected=policy_rejected)
    chosen, rejected = at_least_float32(policy_chosen), at_least_float32(policy_rejected)
    ratios = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
    return -namespace(ratios).mean(log_sigmoid(ratios))


def _log_of_rest(log_probs: Array) -> Array:
    """`log(1 - exp(x))` for x of at most 0, with all digits near 0 and far from it."""
    xp = namespace(log_probs)
    # a certain reply, or an empty one, has the largest odds that are finite, and no gradient
    least = -float(xp.finfo(log_probs.dtype).smallest_normal)
    x = xp.where(log_probs > least, least, log_probs)
    near = x > -math.log(2)
    # each branch sees only values with a finite derivative: the other's nan would reach the gradient
    return xp.where(near, xp.log(-xp.expm1(xp.where(near, x, -1.0))), xp.log1p(-xp.exp(xp.where(near, -1.0, x))))


def bradley_terry_loss(
    chosen_rewards: Array, rejected_rewards: Array, margin: Array | None = None, center_coef: float = 0.0
) -> Array:
    """The mean of `-log sigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected) ** 2`.

    It trains a reward model: the probability that a reply is preferred is the sigmoid of the difference of the rewards
    (Bradley and Terry 1952; Ouyang et al. 2022, eq. 1). Margins: Touvron et al. 2023, eq. 2. The second term keeps
    rewards near 0, since only differences are determined (Eisenstein et al. 2023).

    >>> import torch
    >>> bradley_terry_loss(torch.tensor([2.0]), torch.tensor([1.0]), margin=torch.tensor([1.0]))
    tensor(0.6931)

    Args:
        chosen_rewards: of the preferred replies, shape (batch,).
        rejected_rewards: of the rejected replies.
        margin: by how much the first should exceed the second, shape (batch,); it receives no gradient.
        center_coef: the weight of the second term, such as 0.01.

    Returns:
        Scalar, in float32 at least.

    Raises:
        ConfigurationError: center_coef is not a number of at least 0.
        ValueError: the shapes differ, or are not (batch,).
    """
    place = "bradley_terry_loss"
    require(place, "center_coef", center_coef, *_NOT_NEGATIVE)
    check_replies(place, chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards, margin=margin)
    chosen, rejected = at_least_float32(chosen_rewards), at_least_float32(rejected_rewards)
    difference = chosen - rejected if margin is None else chosen - rejected - constant(margin)
    losses = -log_sigmoid(difference)
    if center_coef:
        losses = losses + float(center_coef) * (chosen + rejected) ** 2
    return namespace(losses).mean(losses)
