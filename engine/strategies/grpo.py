"""Group-relative policy optimisation (Shao 2024): answers to one prompt are judged against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import grpo_advantages, grpo_loss
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.engine.strategies.policy import PolicyStrategy
from pulsetrain.engine.strategies.reference import ReferenceModel

__all__ = ["GRPOStrategy"]


class GRPOStrategy(PolicyStrategy):
    """Raise the probability of texts that were better than the others to their prompt.

    The model gives logits, shape (batch, length, vocabulary).

    Args:
        group_size: texts for each prompt.
        kl_coef: weight of the divergence from the reference, a part of the loss; 0 needs no reference.
        clip_range: how far a probability may move, as a ratio, before it earns nothing more.
        clip_range_high: the same upwards, where it is another (Yu 2025).
        normalization: what the loss is a mean over: "sequence_mean" of each text's mean over its tokens (Shao 2024),
            "token_mean" of all tokens (Yu 2025), or "dr_grpo", of texts, each divided by max_length whatever its own
            (Liu 2025).
        max_length: tokens that a text may have; for "dr_grpo".
        scale_rewards: by the standard deviation of the "group", of the "batch", or by "none" (Liu 2025).
        minibatch_epochs: how often each text of a rollout is learnt from.
        minibatch_size: texts a batch; None takes a whole rollout.
        target_kl: end a rollout's epochs early as soon as the policy is further than this from the one that acted, nats
            a token.
        temperature: what the logits are divided by, in acting and in learning.
        reference: "copy", a model, or None: see `PolicyStrategy`.

    Raises:
        ConfigurationError: a value out of range; the message names it.
    """

    def __init__(
        self,
        group_size: int = 8,
        kl_coef: float = 0.0,
        clip_range: float = 0.2,
        *,
        clip_range_high: float | None = None,
        normalization: str = "sequence_mean",
        max_length: int | None = None,
        scale_rewards: str = "group",
        minibatch_epochs: int = 1,
        minibatch_size: int | None = None,
        target_kl: float | None = None,
        temperature: float = 1.0,
        reference: ReferenceModel = "copy",
    ) -> None:
        super().__init__(
            kl_coef, clip_range, clip_range_high=clip_range_high, minibatch_epochs=minibatch_epochs,
            minibatch_size=minibatch_size, target_kl=target_kl, temperature=temperature, reference=reference,
        )  # fmt: skip
        if kl_coef and reference is None:
            raise ConfigurationError(
                f"GRPOStrategy(kl_coef={kl_coef!r}, reference=None): nothing to diverge from; leave "
                "reference='copy', or set kl_coef=0.0"
            )
        self._whole("group_size", group_size, 2)
        self.group_size, self.scale_rewards = group_size, scale_rewards
        self.normalization, self.max_length = normalization, max_length
        grpo_advantages(torch.zeros(group_size), group_size, scale_rewards)  # refuses wrong ones now, as this does
        self._loss(torch.zeros(1, 1), {
            "log_probs": torch.zeros(1, 1), "advantages": torch.zeros(1), "mask": torch.ones(1, 1, dtype=torch.bool)
        })  # fmt: skip

    def learn_from(self, rollout: Mapping[str, Tensor], kl_coef: float) -> dict[str, Tensor]:
        """Advantages within each group, a row for each text."""
        rows = {name: rollout[name] for name in ("input_ids", "completion_mask", "log_probs")}
        if "reference_log_probs" in rollout:
            rows["reference_log_probs"] = rollout["reference_log_probs"]
        rewards = rollout["rewards"].to(rollout["log_probs"].dtype)
        return {**rows, "advantages": grpo_advantages(rewards, self.group_size, self.scale_rewards)}

    def _row_fields(self, text: bool) -> tuple[str, ...]:
        return (*super()._row_fields(text), *(("reference_log_probs",) if self.kl_coef else ()))

    def _observed(self, batch: Any, targets: dict[str, Tensor]) -> tuple[int, Any]:
        raise TypeError(
            "GRPOStrategy: compares texts, and the batch has 'observations'; in environments use PPOStrategy"
        )

    def _weight(self, mask: Tensor) -> Any:
        return mask.sum() if self.normalization == "token_mean" else len(mask)

    def compute_loss(self, outputs: Any, batch: TrainingBatch, check: bool = False) -> Array:
        """The clipped objective of each token, and the divergence from the reference with its weight; shape ()."""
        if check:
            self.check_batch(outputs, batch)
        return self._loss(self.action_log_probs(outputs, batch.targets["actions"]), batch.targets)

    def _loss(self, log_probs: Array, targets: Mapping[str, Array]) -> Array:
        return grpo_loss(
            log_probs, targets["log_probs"], targets["advantages"], targets["mask"], self.clip_range,
            self.clip_range_high, self.normalization, self.max_length, targets.get("reference_log_probs"),
            self.kl_coef if "reference_log_probs" in targets else 0.0,
        )  # fmt: skip
