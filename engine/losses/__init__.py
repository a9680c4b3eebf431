"""Losses over torch tensors and jax and numpy arrays. Classes are the last dimension; no loss waits for a device."""

from pulsetrain.engine.losses.advantages import gae, gdpo_advantages, grpo_advantages, rloo_advantages
from pulsetrain.engine.losses.classification import bce_with_logits, cross_entropy, focal_loss
from pulsetrain.engine.losses.pairs import bradley_terry_loss, orpo_loss, simpo_loss
from pulsetrain.engine.losses.policy import (
    clip_fraction,
    grpo_loss,
    kl_estimate,
    mean_over_replies,
    ppo_policy_loss,
    ppo_value_loss,
)
from pulsetrain.engine.losses.preference import dpo_loss, implicit_rewards
from pulsetrain.engine.losses.registry import (
    Loss,
    check_first_batch,
    check_first_loss,
    class_weights,
    get_loss,
    ignored_label,
)
from pulsetrain.engine.losses.regression import huber, l1, mse
from pulsetrain.engine.losses.tokens import entropy, masked_sum_log_probs, token_log_probs
from pulsetrain.engine.losses.unpaired import kto_loss

__all__ = [
    "Loss",
    "bce_with_logits",
    "bradley_terry_loss",
    "check_first_batch",
    "check_first_loss",
    "class_weights",
    "clip_fraction",
    "cross_entropy",
    "dpo_loss",
    "entropy",
    "focal_loss",
    "gae",
    "gdpo_advantages",
    "get_loss",
    "grpo_advantages",
    "grpo_loss",
    "huber",
    "ignored_label",
    "implicit_rewards",
    "kl_estimate",
    "kto_loss",
    "l1",
    "masked_sum_log_probs",
    "mean_over_replies",
    "mse",
    "orpo_loss",
    "ppo_policy_loss",
    "ppo_value_loss",
    "rloo_advantages",
    "simpo_loss",
    "token_log_probs",
]
