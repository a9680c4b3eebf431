"""Group-relative policy optimisation (Shao 2024): compares the answers to one prompt with each other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.arrays import Array
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import entropy, grpo_advantages, grpo_loss
from pulsetrain.engine.losses.masks import mean_of
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.engine.strategies.policy import PolicyStrategy
from pulsetrain.engine.strategies.reference import ReferenceModel

__all__ = ["GRPOStrategy"]


class GRPOStrategy(PolicyStrategy):
    """Raises the probability of texts with a higher reward than the other texts for their prompt.

    The model returns logits of shape (batch, length, vocabulary).

    A rollout that is one batch, used once, is trained on with one forward pass, and one of the reference if kl_coef is
    not 0: the policy that acted is the current one. The metrics "policy/entropy" and "rollout/reference_kl" are then
    those of that pass, before the update, and "policy/kl" and "policy/clip_fraction" are 0. For metrics after the
    update pass a target_kl, minibatches, or several epochs. A backend of values computes the passes separately.

    >>> strategy = GRPOStrategy(group_size=2, scale_rewards="none")
    >>> rollout = {"rewards": torch.tensor([1.0, 0.0]), "log_probs": torch.zeros(2, 3)}
    >>> rollout |= {"input_ids": torch.ones(2, 4).long(), "completion_mask": torch.ones(2, 4).bool()}
    >>> strategy.learn_from(rollout, kl_coef=0.0)["advantages"]
    tensor([ 0.5000, -0.5000])

    Args:
        group_size: texts for each prompt.
        kl_coef: weight of the divergence from the reference in the loss; 0 needs no reference.
        clip_range: how far the probability ratio may move before its gradient is clipped.
        clip_range_high: the same upwards, if different (Yu 2025).
        normalization: the mean that the loss is: "sequence_mean", over texts, of each text's mean over its tokens (Shao
            2024); "token_mean", over all tokens (Yu 2025); "dr_grpo", over texts, of sums divided by max_length (Liu
            2025).
        max_length: the largest number of tokens of a text; for "dr_grpo".
        scale_rewards: divide by the standard deviation of the "group" or of the "batch", or "none" (Liu 2025).
        minibatch_epochs: how often each text of a rollout is used.
        minibatch_size: texts in a batch; None uses a whole rollout.
        target_kl: ends a rollout's epochs early if the policy is further than this from the one that acted, in nats per
            token.
        temperature: divides the logits, in acting and in training.
        reference: "copy", a model, or None: see `PolicyStrategy`.

    Raises:
        ConfigurationError: a value is out of range; the message names it.
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
                "nothing to diverge from; leave reference='copy', or set kl_coef=0.0",
                "GRPOStrategy",
                kl_coef=kl_coef,
                reference=None,
            )
        check_whole_number("GRPOStrategy", "group_size", group_size, at_least=2)
        self._row_fields = ("advantages", "reference_log_probs") if kl_coef else ("advantages",)
        self._measured: dict[str, Tensor] = {}  # by the last loss over rows without log-probabilities
        self.group_size, self.scale_rewards = group_size, scale_rewards
        self.normalization, self.max_length = normalization, max_length
        grpo_advantages(torch.zeros(group_size), group_size, scale_rewards)  # rejects wrong values now, as does this:
        self._loss(torch.zeros(1, 1), {
            "log_probs": torch.zeros(1, 1), "advantages": torch.zeros(1), "mask": torch.ones(1, 1, dtype=torch.bool)
        })  # fmt: skip

    def learn_from(self, rollout: Mapping[str, Tensor], kl_coef: float) -> dict[str, Tensor]:
        """The rows of a rollout with advantages within each group, one row per text."""
        kept = ("input_ids", "completion_mask", "log_probs", "reference_log_probs")
        rows = {name: rollout[name] for name in kept if name in rollout}
        rewards = rollout["rewards"].to(rollout["log_probs"].dtype if "log_probs" in rollout else torch.float32)
        return {**rows, "advantages": grpo_advantages(rewards, self.group_size, self.scale_rewards)}

    @property
    def can_learn_in_one_pass(self) -> bool:
        if self.target_kl is not None:  # the policy is measured after the update
            return False
        # a subclass may read the rollout's log-probabilities
        return all(getattr(type(self), name) is getattr(GRPOStrategy, name) for name in ("compute_loss", "learn_from"))

    def take_measured(self) -> dict[str, float]:
        found = {name: float(value) for name, value in self._measured.items()}
        self._measured = {}
        return found

    def _observed(self, batch: Mapping[str, Tensor], targets: dict[str, Tensor]) -> tuple[int, Tensor]:
        raise TypeError(
            "GRPOStrategy: compares texts, and the batch has 'observations'; in environments use PPOStrategy"
        )

    def _weight(self, mask: Tensor) -> int | Tensor:
        return mask.sum() if self.normalization == "token_mean" else len(mask)

    def compute_loss(self, outputs: object, batch: TrainingBatch, check: bool = False) -> Array:
        """The clipped objective plus the weighted divergence from the reference, shape ()."""
        if check:
            self.check_batch(outputs, batch)
        log_probs = self.action_log_probs(outputs, batch.targets["actions"])
        if "log_probs" not in batch.targets:
            self._measured = self._measure(outputs, log_probs, batch.targets)
        return self._with_aux_loss(self._loss(log_probs, batch.targets), outputs)

    @torch.no_grad()
    def _measure(self, outputs: object, log_probs: Tensor, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The metrics of the policy in the forward pass that trains it; on the device, nothing waits."""
        mask, none = targets["mask"], log_probs.new_zeros(())
        found = {"policy/kl": none, "policy/clip_fraction": none}
        found["policy/entropy"] = mean_of(entropy(self.scores(outputs)), mask)
        if "reference_log_probs" in targets:
            found["rollout/reference_kl"] = mean_of(log_probs.detach() - targets["reference_log_probs"], mask)
        return found

    def _loss(self, log_probs: Array, targets: Mapping[str, Array]) -> Array:
        old = targets.get("log_probs", log_probs)  # grpo_loss detaches it
        return grpo_loss(
            log_probs, old, targets["advantages"], targets["mask"], self.clip_range,
            self.clip_range_high, self.normalization, self.max_length, targets.get("reference_log_probs"),
            self.kl_coef if "reference_log_probs" in targets else 0.0,
        )  # fmt: skip
