"""The loss over single replies of which each is judged as desirable or not (KTO)."""

from __future__ import annotations

from pulsetrain.engine.arrays import Array, at_least_float32, log_sigmoid, misshapen, namespace
from pulsetrain.engine.losses.masks import constant
from pulsetrain.engine.losses.preference import check_replies
from pulsetrain.engine.losses.shapes import POSITIVE, require

__all__ = ["kto_loss"]


def kto_loss(
    policy: Array,
    reference: Array,
    desirable: Array,
    kl: Array | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Array:
    """Kahneman-Tversky optimisation: the mean over replies of w (1 - sigmoid(+-beta (policy - reference - kl))).

    The sign is + for desirable replies, whose w is desirable_weight, and - for others, whose w is undesirable_weight.
    Source: Ethayarajh et al. 2024, eq. 7 and 8, without the constant term. With kl = 0 it is the unpaired form of
    "apo_zero" (D'Oosterlinck et al. 2024, eq. 7).

    >>> import torch
    >>> policy, desirable = torch.tensor([-4.0, -4.0]), torch.tensor([True, False])
    >>> kto_loss(policy, policy, desirable)
    tensor(0.5000)
    >>> kto_loss(policy, policy - 1, desirable, kl=torch.tensor(1.0))  # both exceed the reference by the kl
    tensor(0.5000)

    Args:
        policy: log-probability of each reply, summed over its tokens, shape (batch,), nats.
        reference: the same under the reference model; it receives no gradient.
        desirable: whether the reply is, booleans, shape (batch,).
        kl: an estimate, at least 0, of the divergence of the policy from the reference, shape (), nats; it receives no
            gradient. None means 0.
        beta: how strongly the policy is held to the reference.
        desirable_weight: of desirable replies.
        undesirable_weight: of the others.

    Returns:
        Scalar, in float32 at least.

    Raises:
        ConfigurationError: an option is not a positive number.
        ValueError: the shapes do not fit.
        TypeError: `desirable` are not booleans.
    """
    place = "kto_loss"
    options = {"beta": beta, "desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    for name, value in options.items():
        require(place, name, value, *POSITIVE)
    check_replies(place, policy=policy, reference=reference, desirable=desirable)
    xp = namespace(policy, reference, desirable)
    if desirable.dtype != xp.bool:
        given = str(desirable.dtype).removeprefix("torch.")
        raise TypeError(f"{place}(desirable of {given}): needs booleans; pass desirable != 0")
    ratios = at_least_float32(policy) - constant(reference)
    if kl is not None:
        if kl.ndim:
            raise misshapen(place, "needs one number, shape ()", kl=kl)
        ratios = ratios - constant(kl)
    losses = xp.exp(log_sigmoid(float(beta) * xp.where(desirable, -ratios, ratios)))
    return xp.mean(xp.where(desirable, float(desirable_weight) * losses, float(undesirable_weight) * losses))
