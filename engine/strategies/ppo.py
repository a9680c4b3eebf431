"""Proximal policy optimisation (Schulman 2017) of an actor and its critic, in environments and over texts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_number, check_positive
from pulsetrain.engine.arrays import Array
from pulsetrain.engine.errors import refused
from pulsetrain.engine.losses import entropy, gae, ppo_policy_loss, ppo_value_loss
from pulsetrain.engine.losses.masks import mean_of
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.engine.strategies.language import values_of
from pulsetrain.engine.strategies.policy import PolicyStrategy, divergence
from pulsetrain.engine.strategies.reference import ReferenceModel

__all__ = ["PPOStrategy"]


class PPOStrategy(PolicyStrategy):
    """Clipped policy and value losses over rollouts, with advantages from GAE.

    The model returns logits and values: for observations of shapes (batch, actions) and (batch,); for tokens of shapes
    (batch, length, vocabulary) and (batch, length), which `WithValueHead` adds to a language model. In environments,
    `kl_coef` weights the divergence from the policy that acted, as a term of the loss. Over texts it weights the
    divergence from the reference, which is subtracted from each token's reward.

    >>> strategy = PPOStrategy(adaptive_kl=0.1)
    >>> strategy.adapted(kl_coef=0.2, kl=0.5), strategy.adapted(kl_coef=0.2, kl=0.1), strategy.adapted(0.2, kl=0.01)
    (0.4, 0.2, 0.1)

    Args:
        kl_coef: weight of the divergence, see above.
        clip_range: how far the probability ratio may move before its gradient is clipped.
        clip_range_high: the same upwards, if different.
        value_coef: weight of the value loss.
        value_clip_range: how far a value may move before its gradient is clipped; None disables clipping.
        entropy_coef: weight of the entropy bonus.
        gamma: discount of later rewards; 1.0 is usual over texts.
        lam: the lambda of GAE: 0 relies on the values, 1 on the rewards.
        minibatch_epochs: how often each row of a rollout is used.
        minibatch_size: rows in a batch; None uses a whole rollout.
        target_kl: ends a rollout's epochs early if the policy is further than this from the one that acted, in nats per
            action.
        adaptive_kl: a target in nats per action. `kl_coef` doubles after a rollout whose divergence exceeds 1.5 times
            the target, and halves if it is below the target divided by 1.5 (Schulman 2017, section 4). None keeps it.
        normalize_advantages: to mean 0 and standard deviation 1 over a rollout.
        temperature: divides the logits, in acting and in training.
        reference: "copy", a model, or None: see `PolicyStrategy`.

    Raises:
        ConfigurationError: a value is out of range; the message names it.
    """

    needs_values = True
    _row_fields = ("log_probs", "advantages", "values", "returns")

    def __init__(
        self,
        kl_coef: float = 0.1,
        clip_range: float = 0.2,
        *,
        clip_range_high: float | None = None,
        value_coef: float = 0.5,
        value_clip_range: float | None = None,
        entropy_coef: float = 0.0,
        gamma: float = 0.99,
        lam: float = 0.95,
        minibatch_epochs: int = 4,
        minibatch_size: int | None = None,
        target_kl: float | None = None,
        adaptive_kl: float | None = None,
        normalize_advantages: bool = True,
        temperature: float = 1.0,
        reference: ReferenceModel = "copy",
    ) -> None:
        super().__init__(
            kl_coef, clip_range, clip_range_high=clip_range_high, minibatch_epochs=minibatch_epochs,
            minibatch_size=minibatch_size, target_kl=target_kl, temperature=temperature, reference=reference,
        )  # fmt: skip
        check_number("PPOStrategy", "value_coef", value_coef)
        check_number("PPOStrategy", "entropy_coef", entropy_coef)
        for name, value in (("value_clip_range", value_clip_range), ("adaptive_kl", adaptive_kl)):
            check_positive("PPOStrategy", name, value, or_none=True)
        self.gamma, self.lam, self.adaptive_kl = gamma, lam, adaptive_kl
        if adaptive_kl is not None and not kl_coef:
            rule = "0 stays 0 when it is doubled; start with a kl_coef above 0, or leave adaptive_kl out"
            raise refused(self, rule, "kl_coef", "adaptive_kl")
        gae(torch.zeros(1), torch.zeros(2), torch.zeros(1, dtype=torch.bool), gamma, lam)  # rejects wrong values now
        self.value_coef, self.value_clip_range, self.entropy_coef = value_coef, value_clip_range, entropy_coef
        self.normalize_advantages = normalize_advantages

    def adapted(self, kl_coef: float, kl: float) -> float:
        """The coefficient doubled, halved or unchanged, see `adaptive_kl`."""
        if self.adaptive_kl is None:
            return kl_coef
        return kl_coef * 2 if kl > 1.5 * self.adaptive_kl else kl_coef / 2 if kl < self.adaptive_kl / 1.5 else kl_coef

    def learn_from(self, rollout: Mapping[str, Tensor], kl_coef: float) -> dict[str, Tensor]:
        """The rows of a rollout with advantages and returns, one row per step or text."""
        return self._texts(rollout, kl_coef) if "input_ids" in rollout else self._steps(rollout, kl_coef)

    def _steps(self, rollout: Mapping[str, Tensor], kl_coef: float) -> dict[str, Tensor]:
        """Rows of steps in environments: fields of shape (steps, environments, ...), values with one step more."""
        # a truncated episode would have continued: the value of its last observation is added to its last reward
        rewards = rollout["rewards"] + self.gamma * rollout["truncation_values"]
        advantages, returns = gae(rewards, rollout["values"], rollout["dones"], self.gamma, self.lam)
        rows = {name: rollout[name] for name in ("observations", "actions", "log_probs")}
        rows |= {"values": rollout["values"][:-1], "advantages": self._normal(advantages), "returns": returns}
        rows = {name: each.flatten(0, 1) for name, each in rows.items()}
        if kl_coef:
            rows["kl_coef"] = advantages.new_tensor(kl_coef)
        return rows

    def _texts(self, rollout: Mapping[str, Tensor], kl_coef: float) -> dict[str, Tensor]:
        """Rows of texts: the last token gets the reward, minus each token's divergence from the reference."""
        mask = rollout["completion_mask"][:, 1:]
        log_probs, values = rollout["log_probs"], torch.where(mask, rollout["values"], 0.0)
        remaining = mask.long().flip(1).cumsum(1).flip(1)  # generated tokens from here on
        last = mask & (remaining == 1)
        rewards = torch.where(last, rollout["rewards"].to(values.dtype).unsqueeze(1), 0.0)
        if "reference_log_probs" in rollout:
            rewards = rewards - torch.where(mask, kl_coef * (log_probs - rollout["reference_log_probs"]), 0.0)
        # generated tokens first, in their order: those of an environment between two turns take no time
        order = (~mask).long().argsort(dim=1, stable=True)
        steps = [each.gather(1, order).T for each in (rewards, values, last)]  # gae has time as the first dimension
        end = values.new_zeros(1, len(values))
        found = gae(steps[0], torch.cat([steps[1], end]), steps[2], self.gamma, self.lam)
        advantages, returns = (
            torch.where(mask, torch.zeros_like(each.T).scatter(1, order, each.T), 0.0) for each in found
        )
        return {
            "input_ids": rollout["input_ids"],
            "completion_mask": rollout["completion_mask"],
            "log_probs": log_probs,
            "values": values,
            "advantages": self._normal(advantages, mask),
            "returns": returns,
        }

    def _normal(self, advantages: Tensor, mask: Tensor | None = None) -> Tensor:
        if not self.normalize_advantages:
            return advantages
        chosen = advantages if mask is None else advantages[mask]
        normal = (advantages - chosen.mean()) / (chosen.std(correction=0) + 1e-8)
        return normal if mask is None else torch.where(mask, normal, 0.0)

    def compute_loss(self, outputs: object, batch: TrainingBatch, check: bool = False) -> Array:
        """The weighted sum of policy loss, value loss, entropy and, in environments, divergence; shape ()."""
        if check:
            self.check_batch(outputs, batch)
        targets = batch.targets
        old, mask = targets["log_probs"], targets.get("mask")
        log_probs = self.action_log_probs(outputs, targets["actions"])
        loss = ppo_policy_loss(log_probs, old, targets["advantages"], self.clip_range, mask, self.clip_range_high)
        if self.value_coef:
            loss = loss + self.value_coef * self._value_loss(outputs, targets)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * mean_of(entropy(self.scores(outputs)), mask)
        if "kl_coef" in targets:
            loss = loss + targets["kl_coef"] * divergence(old, log_probs, mask)
        return self._with_aux_loss(loss, outputs)

    def _value_loss(self, outputs: object, targets: Mapping[str, Array]) -> Array:
        values = values_of(outputs, targets["actions"].shape)
        mask = targets.get("mask")
        return ppo_value_loss(values, targets["values"], targets["returns"], self.value_clip_range, mask)

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> Mapping[str, Array]:
        """The metrics of `PolicyStrategy`, and `value_loss`."""
        return {**super().compute_metrics(outputs, batch), "value_loss": self._value_loss(outputs, batch.targets)}
