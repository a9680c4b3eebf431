"""Losses over pairs of a preferred and a rejected reply, and the rewards that a trained policy implies."""

from __future__ import annotations

from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.arrays import Array, at_least_float32, log_sigmoid, misshapen, namespace
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses.masks import check_same_shapes, constant
from pulsetrain.engine.losses.shapes import POSITIVE, require

__all__ = ["dpo_loss", "implicit_rewards"]

_LOSS_TYPES = ("sigmoid", "hinge", "ipo")


def dpo_loss(
    policy_chosen: Array,
    policy_rejected: Array,
    reference_chosen: Array | None = None,
    reference_rejected: Array | None = None,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Array:
    """Direct preference optimisation: the mean over pairs of a loss of h.

    h = (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected), and its loss is

    - "sigmoid": `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)` with e the label smoothing (Rafailov et al.
      2023, eq. 7; Mitchell 2023 for e above 0);
    - "hinge": `max(0, 1 - beta h)` (Zhao et al. 2023);
    - "ipo": `(h - 1 / (2 beta)) ** 2` (Azar et al. 2023, eq. 17).

    >>> import torch
    >>> chosen, rejected = torch.tensor([-4.0]), torch.tensor([-6.0])
    >>> dpo_loss(chosen, rejected, reference_chosen=torch.tensor([-5.0]), reference_rejected=torch.tensor([-5.0]))
    tensor(0.5981)
    >>> dpo_loss(chosen, rejected, beta=0.5, loss_type="hinge")  # no reference: h = 2
    tensor(0.)

    Args:
        policy_chosen: log-probability of each preferred reply, summed over its tokens, shape (batch,), nats; for
            "ipo" the mean over its tokens. See `masked_sum_log_probs`.
        policy_rejected: the same for the rejected replies.
        reference_chosen: log-probabilities of the preferred replies under the reference model; they receive no
            gradient. Without a reference these terms are 0.
        reference_rejected: the same for the rejected replies.
        beta: how strongly the policy is held to the reference.
        label_smoothing: the assumed share of pairs whose preference is wrong; only for "sigmoid".

    Returns:
        Scalar, in float32 at least.

    Raises:
        ConfigurationError: an option is out of range or unknown, or one of the two references is missing.
        ValueError: the shapes differ, or are not (batch,).
    """
    place = "dpo_loss"
    require(place, "beta", beta, *POSITIVE)
    check_choice(place, "loss_type", loss_type, _LOSS_TYPES)
    needs = "a number of at least 0 and below 0.5"
    require(place, "label_smoothing", label_smoothing, lambda part: 0.0 <= part < 0.5, needs)
    if label_smoothing and loss_type != "sigmoid":
        raise ConfigurationError(
            "only 'sigmoid' takes label smoothing; leave it out",
            place,
            label_smoothing=label_smoothing,
            loss_type=loss_type,
        )
    if (reference_chosen is None) != (reference_rejected is None):
        missing, other = "reference_chosen", "reference_rejected"
        if reference_chosen is not None:
            missing, other = other, missing
        raise ConfigurationError(f"needs both references or none; pass it as well as {other}", place, **{missing: None})
    xp = namespace(policy_chosen, policy_rejected, reference_chosen, reference_rejected, place=place)
    check_same_shapes(
        place,
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
    )
    if policy_chosen.ndim != 1:
        needs = "needs a number for each reply, shape (batch,); masked_sum_log_probs sums over tokens"
        raise misshapen(place, needs, policy_chosen=policy_chosen)
    chosen, rejected = at_least_float32(policy_chosen), at_least_float32(policy_rejected)
    if reference_chosen is not None and reference_rejected is not None:
        # per reply first: two models differ less than two replies do, so rounding loses less
        chosen, rejected = chosen - constant(reference_chosen), rejected - constant(reference_rejected)
    h, beta = chosen - rejected, float(beta)
    if loss_type == "ipo":
        return xp.mean((h - 1 / (2 * beta)) ** 2)
    if loss_type == "hinge":
        return xp.mean(xp.where(beta * h >= 1, 0.0, 1 - beta * h))
    losses = -log_sigmoid(beta * h)
    if label_smoothing:
        losses = (1 - float(label_smoothing)) * losses - float(label_smoothing) * log_sigmoid(-beta * h)
    return xp.mean(losses)


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
