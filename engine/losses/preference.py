"""Losses over pairs of a preferred and a rejected reply, by their log-ratios to a reference (DPO and its family)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.arrays import Array, at_least_float32, log_sigmoid, misshapen, namespace
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses.masks import check_same_shapes, constant
from pulsetrain.engine.losses.shapes import POSITIVE, require

__all__ = [
    "LOSSES",
    "OF_MEANS",
    "SMOOTHED",
    "check_replies",
    "check_smoothing",
    "dpo_loss",
    "implicit_rewards",
    "smoothed",
]


class _Pairs(NamedTuple):
    """Log-probabilities of replies, each of shape (batch,), and the options of the loss."""

    policy: tuple[Array, Array]  # chosen, rejected
    reference: tuple[Array, Array] | None
    chosen: Array  # the log-ratio of the policy to the reference
    rejected: Array
    beta: float
    smoothing: float
    tau: float

    @property
    def scaled(self) -> Array:
        """The scaled difference b h, see `dpo_loss`."""
        return self.beta * (self.chosen - self.rejected)


def smoothed(x: Array, smoothing: float) -> Array:
    """`-(1 - e) log sigmoid(x) - e log sigmoid(-x)` of each x, with e the smoothing.

    >>> import torch
    >>> smoothed(torch.tensor([0.0]), 0.2)
    tensor([0.6931])
    """
    losses = -log_sigmoid(x)
    return losses if not smoothing else (1 - smoothing) * losses - smoothing * log_sigmoid(-x)


def _sigmoid(pairs: _Pairs) -> Array:
    return smoothed(pairs.scaled, pairs.smoothing)


def _robust(pairs: _Pairs) -> Array:
    right, wrong = log_sigmoid(pairs.scaled), log_sigmoid(-pairs.scaled)
    return (pairs.smoothing * wrong - (1 - pairs.smoothing) * right) / (1 - 2 * pairs.smoothing)


def _hinge(pairs: _Pairs) -> Array:
    x = pairs.scaled
    return namespace(x).where(x >= 1, 0.0, 1 - x)


def _ipo(pairs: _Pairs) -> Array:
    return (pairs.chosen - pairs.rejected - 1 / (2 * pairs.beta)) ** 2


def _exo_pair(pairs: _Pairs) -> Array:
    exp = namespace(pairs.chosen).exp
    right, wrong = log_sigmoid(pairs.scaled), log_sigmoid(-pairs.scaled)
    given = math.log1p(-pairs.smoothing), math.log(pairs.smoothing)
    return exp(right) * (right - given[0]) + exp(wrong) * (wrong - given[1])


def _nca_pair(pairs: _Pairs) -> Array:
    chosen, rejected = pairs.beta * pairs.chosen, pairs.beta * pairs.rejected
    return -log_sigmoid(chosen) - 0.5 * (log_sigmoid(-chosen) + log_sigmoid(-rejected))


def _bco_pair(pairs: _Pairs) -> Array:
    return -log_sigmoid(pairs.beta * pairs.chosen) - log_sigmoid(-pairs.beta * pairs.rejected)


def _sppo_hard(pairs: _Pairs) -> Array:
    target = 1 / (2 * pairs.beta)
    return (pairs.chosen - target) ** 2 + (pairs.rejected + target) ** 2


def _aot(pairs: _Pairs) -> Array:
    sort = namespace(pairs.chosen).sort
    margins = sort(pairs.policy[0] - pairs.policy[1])
    if pairs.reference is not None:
        margins = margins - sort(pairs.reference[0] - pairs.reference[1])
    return smoothed(pairs.beta * margins, pairs.smoothing)


def _aot_unpaired(pairs: _Pairs) -> Array:
    sort = namespace(pairs.chosen).sort
    return smoothed(pairs.beta * (sort(pairs.chosen) - sort(pairs.rejected)), pairs.smoothing)


def _apo_zero(pairs: _Pairs) -> Array:
    exp = namespace(pairs.chosen).exp
    return exp(log_sigmoid(-pairs.beta * pairs.chosen)) + exp(log_sigmoid(pairs.beta * pairs.rejected))


def _apo_down(pairs: _Pairs) -> Array:
    exp = namespace(pairs.chosen).exp
    return exp(log_sigmoid(pairs.beta * pairs.chosen)) + exp(log_sigmoid(-pairs.scaled))


def _discopop(pairs: _Pairs) -> Array:
    x = pairs.scaled
    exp, blend = namespace(x).exp, x / pairs.tau
    # in one exponential: exp(-x) overflows where its weight is 0
    return -log_sigmoid(x) * exp(log_sigmoid(-blend)) + exp(log_sigmoid(blend) - x)


LOSSES: dict[str, Callable[[_Pairs], Array]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}
OF_MEANS = ("ipo", "sigmoid_norm")
"""The types of `dpo_loss` over means of the tokens' log-probabilities; the others are over sums."""
SMOOTHED = ("aot", "aot_unpaired", "exo_pair", "robust", "sigmoid")
"""The types of `dpo_loss` that take label smoothing."""


def dpo_loss(
    policy_chosen: Array,
    policy_rejected: Array,
    reference_chosen: Array | None = None,
    reference_rejected: Array | None = None,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
) -> Array:
    """Direct preference optimisation: the mean over pairs of a loss of log-ratios to the reference.

    c = policy_chosen - reference_chosen, r = policy_rejected - reference_rejected, h = c - r, b = beta, e = the label
    smoothing, s = sigmoid. The loss of a pair is

    - "sigmoid": `-(1 - e) log s(b h) - e log s(-b h)` (Rafailov et al. 2023, eq. 7; Mitchell 2023 for e above 0);
    - "sigmoid_norm": `-log s(b h)` of means over tokens: the first, independent of the length of replies;
    - "robust": `(-(1 - e) log s(b h) + e log s(-b h)) / (1 - 2 e)` (Ray Chowdhury et al. 2024);
    - "hinge": `max(0, 1 - b h)` (Zhao et al. 2023);
    - "ipo": `(h - 1 / (2 b)) ** 2` of means over tokens (Azar et al. 2023, eq. 17);
    - "exo_pair": `s(b h) log(s(b h) / (1 - e)) + s(-b h) log(s(-b h) / e)` (Ji et al. 2024, eq. 16), for e above 0;
    - "nca_pair": `-log s(b c) - (log s(-b c) + log s(-b r)) / 2` (Chen et al. 2024);
    - "bco_pair": `-log s(b c) - log s(-b r)` (Jung et al. 2024, without a shift of the rewards);
    - "sppo_hard": `(c - 1 / (2 b)) ** 2 + (r + 1 / (2 b)) ** 2` (Wu et al. 2024, eq. 4.7, with probabilities 1 and 0);
    - "apo_zero": `1 - s(b c) + s(b r)`, for replies better than the model's own (D'Oosterlinck et al. 2024, eq. 7);
    - "apo_down": `s(b c) + 1 - s(b h)`, for replies worse than the model's own (the same, eq. 8);
    - "aot": "sigmoid", with h the difference of `policy_chosen - policy_rejected` and `reference_chosen -
      reference_rejected`, each sorted over the batch (Melnyk et al. 2024);
    - "aot_unpaired": "sigmoid", with h the difference of c and r, each sorted over the batch (the same);
    - "discopop": `(1 - m) (-log s(b h)) + m exp(-b h)` with `m = s(b h / discopop_tau)` (Lu et al. 2024, eq. 5).

    >>> import torch
    >>> chosen, rejected = torch.tensor([-4.0]), torch.tensor([-6.0])
    >>> dpo_loss(chosen, rejected, reference_chosen=torch.tensor([-5.0]), reference_rejected=torch.tensor([-5.0]))
    tensor(0.5981)
    >>> dpo_loss(chosen, rejected, beta=0.5, loss_type="hinge")  # no reference: h = 2
    tensor(0.)

    Args:
        policy_chosen: log-probability of each preferred reply, summed over its tokens, shape (batch,), nats; for the
            types in `OF_MEANS` the mean over its tokens. See `masked_sum_log_probs`.
        policy_rejected: the same for the rejected replies.
        reference_chosen: log-probabilities of the preferred replies under the reference model; they receive no
            gradient. Without a reference these terms are 0.
        reference_rejected: the same for the rejected replies.
        beta: how strongly the policy is held to the reference.
        label_smoothing: the assumed share of pairs whose preference is wrong; for the types in `SMOOTHED`.
        discopop_tau: how sharply "discopop" changes from one of its terms to the other.

    Returns:
        Scalar, in float32 at least.

    Raises:
        ConfigurationError: an option is out of range or unknown, or one of the two references is missing.
        ValueError: the shapes differ, or are not (batch,).
    """
    place = "dpo_loss"
    require(place, "beta", beta, *POSITIVE)
    check_choice(place, "loss_type", loss_type, LOSSES)
    check_smoothing(place, label_smoothing)
    require(place, "discopop_tau", discopop_tau, *POSITIVE)
    rule = ""
    if label_smoothing and loss_type not in SMOOTHED:
        rule = f"only {', '.join(SMOOTHED)} take label smoothing; leave it out"
    elif not label_smoothing and loss_type == "exo_pair":
        rule = "needs a label smoothing above 0, such as 0.001"
    if rule:
        raise ConfigurationError(rule, place, label_smoothing=label_smoothing, loss_type=loss_type)
    if (reference_chosen is None) != (reference_rejected is None):
        missing, other = "reference_chosen", "reference_rejected"
        if reference_chosen is not None:
            missing, other = other, missing
        raise ConfigurationError(f"needs both references or none; pass it as well as {other}", place, **{missing: None})
    check_replies(
        place,
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
    )
    policy = at_least_float32(policy_chosen), at_least_float32(policy_rejected)
    ratios, reference = policy, None
    if reference_chosen is not None and reference_rejected is not None:
        reference = constant(reference_chosen), constant(reference_rejected)
        # per reply first: two models differ less than two replies do, so rounding loses less
        ratios = policy[0] - reference[0], policy[1] - reference[1]
    pairs = _Pairs(policy, reference, *ratios, float(beta), float(label_smoothing), float(discopop_tau))
    losses = LOSSES[loss_type](pairs)
    return namespace(losses).mean(losses)


def implicit_rewards(policy: Array, reference: Array | None = None, beta: float = 0.1) -> Array:
    """`beta * (policy - reference)`: the reward of each reply that a policy trained with `dpo_loss` implies.

    >>> import torch
    >>> implicit_rewards(torch.tensor([-4.0]), torch.tensor([-5.0]), beta=0.5)
    tensor([0.5000])

    Args:
        policy: log-probabilities of replies, shape (batch,), nats.
        reference: the same under the reference model; None means 0.

    Returns:
        Shape (batch,), in float32 at least, without a gradient.

    Raises:
        ConfigurationError: beta is not a positive number.
        ValueError: the shapes differ.
    """
    place = "implicit_rewards"
    require(place, "beta", beta, *POSITIVE)
    namespace(policy, reference, place=place)
    check_same_shapes(place, policy=policy, reference=reference)
    margin = constant(policy) if reference is None else constant(policy) - constant(reference)
    return float(beta) * margin


def check_smoothing(place: str, label_smoothing: float) -> None:
    """Rejects a share of wrong preferences that is not below one half.

    Raises:
        ConfigurationError: it is not.
    """
    needs = "a number of at least 0 and below 0.5"
    require(place, "label_smoothing", label_smoothing, lambda part: 0.0 <= part < 0.5, needs)


def check_replies(place: str, **arrays: Array | None) -> None:
    """Rejects arrays that are not of one library, or not of one shape (batch,); None is skipped.

    Raises:
        TypeError: they are of several libraries.
        ValueError: the shapes differ, or are not (batch,).
    """
    namespace(*arrays.values(), place=place)
    check_same_shapes(place, **arrays)
    name, first = next(iter(arrays.items()))
    assert first is not None
    if first.ndim != 1:
        needs = "needs a number for each reply, shape (batch,); masked_sum_log_probs sums over tokens"
        raise misshapen(place, needs, **{name: first})
