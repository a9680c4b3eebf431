"""Proximal policy optimisation (Schulman 2017) of an actor and its critic, in environments and over texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_choice, check_number, check_positive
from pulsetrain.engine.arrays import Array, misshapen
from pulsetrain.engine.errors import ConfigurationError, raised_by, refused
from pulsetrain.engine.losses import gae, ppo_policy_loss, ppo_value_loss
from pulsetrain.engine.losses.masks import mean_of
from pulsetrain.engine.schedules.formula import Schedule
from pulsetrain.engine.step.protocols import TrainingBatch, Tree, describe
from pulsetrain.engine.strategies.distributions import ActionDistribution, Categorical
from pulsetrain.engine.strategies.language import values_of
from pulsetrain.engine.strategies.policy import PolicyStrategy, divergence
from pulsetrain.engine.strategies.reference import Reference, ReferenceModel

__all__ = ["PPOStrategy"]

_DISTRIBUTIONS = ("categorical", "multi_categorical", "gaussian", "squashed_gaussian")
_NORMALIZATIONS = ("minibatch", "rollout")


class PPOStrategy(PolicyStrategy):
    """Clipped policy and value losses over rollouts, with advantages from GAE.

    The model returns logits and values: for observations of shapes (batch, actions) and (batch,), or the parameters of
    another distribution, see `EnvironmentRollouts`; for tokens of shapes (batch, length, vocabulary) and (batch,
    length), which `WithValueHead` adds to a language model. In environments, `kl_coef` weights the divergence from the
    policy that acted, as a term of the loss. Over texts it weights the divergence from the reference, which is
    subtracted from each token's reward.

    >>> strategy = PPOStrategy(adaptive_kl=0.1)
    >>> strategy.adapted(kl_coef=0.2, kl=0.5), strategy.adapted(kl_coef=0.2, kl=0.1), strategy.adapted(0.2, kl=0.01)
    (0.4, 0.2, 0.1)
    >>> from pulsetrain.engine.schedules import Linear
    >>> PPOStrategy(clip_range=Linear(0.2, total_steps=100)).scheduled(50)  # of the 51st of 100 rollouts
    {'clip_range': 0.1}

    Args:
        kl_coef: weight of the divergence, see above. None: 0.1 over texts and with adaptive_kl, otherwise 0.
        clip_range: how far the probability ratio may move before its gradient is clipped; or a schedule of it over the
            rollouts of a run, whose steps are the rollouts before.
        clip_range_high: the same upwards, if different.
        value_coef: weight of the value loss.
        value_clip_range: how far a value may move before its gradient is clipped; None disables clipping.
        entropy_coef: weight of the entropy bonus, or a schedule of it over the rollouts.
        gamma: discount of later rewards; 1.0 is usual over texts.
        lam: the lambda of GAE: 0 relies on the values, 1 on the rewards.
        minibatch_epochs: how often each row of a rollout is used.
        minibatch_size: rows in a batch; None uses a whole rollout.
        target_kl: ends a rollout's epochs early if the policy is further than this from the one that acted, in nats per
            action.
        adaptive_kl: a target in nats per action. `kl_coef` doubles after a rollout whose divergence exceeds 1.5 times
            the target, and halves if it is below the target divided by 1.5 (Schulman 2017, section 4). None keeps it.
        normalize_advantages: to mean 0 and standard deviation 1 over each "minibatch" or over the "rollout". True:
            minibatches in environments, and the rollout over texts. False leaves them as they are.
        temperature: divides the logits, in acting and in training.
        reference: "copy", a model, or None: see `PolicyStrategy`. In environments there is none.
        distribution: of actions in environments, "gaussian" or "squashed_gaussian" for those of a Box; None: the usual
            one for the space of actions.

    Raises:
        ConfigurationError: a value is out of range; the message names it.
    """

    gamma: float
    lam: float
    adaptive_kl: float | None
    value_coef: float
    value_clip_range: float | None
    normalize_advantages: str | bool
    distribution: str | None
    kl_coef: float

    needs_values = True
    _row_fields = ("log_probs", "advantages", "values", "returns")

    def __init__(
        self,
        kl_coef: float | None = None,
        clip_range: float | Schedule = 0.2,
        *,
        clip_range_high: float | None = None,
        value_coef: float = 0.5,
        value_clip_range: float | None = None,
        entropy_coef: float | Schedule = 0.0,
        gamma: float = 0.99,
        lam: float = 0.95,
        minibatch_epochs: int = 4,
        minibatch_size: int | None = None,
        target_kl: float | None = None,
        adaptive_kl: float | None = None,
        normalize_advantages: bool | str = True,
        temperature: float = 1.0,
        reference: ReferenceModel = "copy",
        distribution: str | None = None,
    ) -> None:
        self._schedules: dict[str, Schedule] = {}
        super().__init__(
            0.1 if kl_coef is None else kl_coef, self._first("clip_range", clip_range), clip_range_high=clip_range_high,
            minibatch_epochs=minibatch_epochs, minibatch_size=minibatch_size, target_kl=target_kl,
            temperature=temperature, reference=reference,
        )  # fmt: skip
        check_number("PPOStrategy", "value_coef", value_coef)
        self.entropy_coef: Any = self._first("entropy_coef", entropy_coef)
        check_number("PPOStrategy", "entropy_coef", self.entropy_coef)
        for name, value in (("value_clip_range", value_clip_range), ("adaptive_kl", adaptive_kl)):
            check_positive("PPOStrategy", name, value, or_none=True)
        self.gamma, self.lam, self.adaptive_kl = gamma, lam, adaptive_kl
        if adaptive_kl is not None and not self.kl_coef:
            rule = "0 stays 0 when it is doubled; start with a kl_coef above 0, or leave adaptive_kl out"
            raise refused(self, rule, "kl_coef", "adaptive_kl")
        with raised_by("PPOStrategy"):  # rejects wrong values now
            gae(torch.zeros(1), torch.zeros(2), torch.zeros(1, dtype=torch.bool), gamma, lam)
        self.value_coef, self.value_clip_range = value_coef, value_clip_range
        if isinstance(normalize_advantages, str):
            check_choice("PPOStrategy", "normalize_advantages", normalize_advantages, _NORMALIZATIONS)
        if distribution is not None:
            check_choice("PPOStrategy", "distribution", distribution, _DISTRIBUTIONS)
        self.normalize_advantages, self.distribution = normalize_advantages, distribution
        self._by_default = kl_coef is None
        self._acts: ActionDistribution = Categorical()
        self._bound = False  # to environments

    def _first(self, name: str, value: Any) -> Any:
        """The value, or the first one of a schedule, which is kept."""
        if not isinstance(value, Schedule):
            return value
        self._schedules[name] = value
        return value.get_lr(0)

    def bind_environment(self, distribution: ActionDistribution) -> None:
        """Learns from steps with actions of this distribution; `EnvironmentRollouts` calls it.

        There is no reference then, and no divergence is penalised by default.

        Raises:
            ConfigurationError: it serves an environment with other actions already.
        """
        if self._bound and self._acts != distribution:
            raise ConfigurationError(
                f"PPOStrategy: serves an environment with {self._acts} already, and this one has {distribution}; give "
                "each Trainer its own strategy"
            )
        self._acts, self._bound = distribution, True
        self._reference = Reference(None, self._place)
        if self._by_default and self.adaptive_kl is None:
            self.kl_coef = 0.0

    def scheduled(self, rollouts: int) -> dict[str, float]:
        """The values of clip_range and entropy_coef that follow a schedule, after this number of rollouts.

        Raises:
            ConfigurationError: a value is out of range.
        """
        found = {name: schedule.get_lr(rollouts) for name, schedule in self._schedules.items()}
        for name, value in found.items():
            if not 0 <= value < (1.0 if name == "clip_range" else math.inf):
                rule = f"is {value!r} after {rollouts} rollouts; needs a number of at least 0"
                rule += " and below 1" if name == "clip_range" else ""
                raise ConfigurationError(rule, "PPOStrategy", **{name: self._schedules[name]})
        return found

    def adapted(self, kl_coef: float, kl: float) -> float:
        """The coefficient doubled, halved or unchanged, see `adaptive_kl`."""
        if self.adaptive_kl is None:
            return kl_coef
        return kl_coef * 2 if kl > 1.5 * self.adaptive_kl else kl_coef / 2 if kl < self.adaptive_kl / 1.5 else kl_coef

    # --------------------------------------------------------------------------------------------------- the rollout

    def action_log_probs(self, outputs: object, actions: Array) -> Array:
        return self._acts.log_probs(self.scores(outputs), actions)

    def entropies(self, outputs: object) -> Array:
        return self._acts.entropy(self.scores(outputs))

    def learn_from(self, rollout: Mapping[str, Tensor], kl_coef: float) -> dict[str, Tensor]:
        """The rows of a rollout with advantages and returns, one row per step, sequence or text."""
        return self._texts(rollout, kl_coef) if "input_ids" in rollout else self._steps(rollout, kl_coef)

    def _steps(self, rollout: Mapping[str, Tensor], kl_coef: float) -> dict[str, Tensor]:
        """Rows of steps in environments: fields of shape (steps, environments, ...), values with one step more.

        With "starts" they are sequences, as many in each environment as there are states of the policy.
        """
        # a truncated episode would have continued: the value of its last observation is added to its last reward
        rewards = rollout["rewards"] + self.gamma * rollout["truncation_values"]
        advantages, returns = gae(rewards, rollout["values"], rollout["dones"], self.gamma, self.lam)
        kept = ("observations", "actions", "log_probs", "starts")
        rows = {name: each for name, each in rollout.items() if name.partition("/")[0] in kept}
        if self.normalize_advantages == "rollout":
            advantages = _normal(advantages)
        rows |= {"values": rollout["values"][:-1], "advantages": advantages, "returns": returns}
        states = {name: each for name, each in rollout.items() if name.startswith("state/")}
        if "starts" in rollout:
            sequences = len(next(iter(states.values())))
            rows = {name: each.unflatten(0, (sequences, -1)).transpose(1, 2) for name, each in rows.items()}
        rows = {name: each.flatten(0, 1) for name, each in (rows | states).items()}
        if kl_coef:
            rows["kl_coef"] = advantages.new_tensor(kl_coef)
        return rows

    def _texts(self, rollout: Mapping[str, Tensor], kl_coef: float) -> dict[str, Tensor]:
        """Rows of texts: the last token gets the reward, minus each token's divergence from the reference."""
        if self.distribution is not None:
            raise refused(self, "is of actions in environments, and these are texts; leave it out", "distribution")
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
            "advantages": _normal(advantages, mask) if self.normalize_advantages in (True, "rollout") else advantages,
            "returns": returns,
        }

    def minibatch(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows with advantages normalised over them, if they are to be over minibatches."""
        mask = rows["completion_mask"][:, 1:] if "completion_mask" in rows else None
        if self.normalize_advantages == "minibatch" or (self.normalize_advantages is True and mask is None):
            return {**rows, "advantages": _normal(rows["advantages"], mask)}
        return rows

    # --------------------------------------------------------------------------------------------------- for training

    def _observed(self, batch: Mapping[str, Tensor], targets: dict[str, Tensor]) -> tuple[int, Tree]:
        targets["actions"] = actions = self._field(batch, "actions", self._remedy)
        dims = self._acts.action_dims + (2 if "starts" in batch else 1)
        if actions.ndim != dims or actions.is_floating_point() != self._acts.is_continuous:
            needs = "the numbers of actions, shape (rows,)"
            if self._bound:
                needs = f"actions of {self._acts} in {dims} dimensions"
            raise TypeError(f"{self._place}: 'actions' is {describe(actions)}; needs {needs}")
        named = {name.partition("/")[2]: each for name, each in batch.items() if name.startswith("observations/")}
        observations: Tree = named or self._field(batch, "observations", self._remedy)
        if "starts" in batch:
            states = tuple(each for name, each in batch.items() if name.startswith("state/"))
            state = states[0] if len(states) == 1 else states
            return len(actions), {"observations": observations, "state": state, "starts": batch["starts"]}
        return len(actions), observations

    def check_batch(self, outputs: object, batch: TrainingBatch) -> None:
        """Rejects actions that the model has no numbers for; it waits for the device.

        Raises:
            ValueError: names the first one, its index, and how many there are.
        """
        if not self._acts.action_dims:
            super().check_batch(outputs, batch)
            return
        actions, parameters = batch.targets["actions"], self.scores(outputs)
        if tuple(parameters.shape) != (*actions.shape[:-1], self._acts.width):
            needs = f"needs {self._acts.width} numbers for each action of {self._acts}"
            raise misshapen("PPOStrategy", needs, parameters=parameters, actions=actions)

    def compute_loss(self, outputs: object, batch: TrainingBatch, check: bool = False) -> Array:
        """The weighted sum of policy loss, value loss, entropy and, in environments, divergence; shape ()."""
        if check:
            self.check_batch(outputs, batch)
        targets = batch.targets
        old, mask = targets["log_probs"], targets.get("mask")
        log_probs = self.action_log_probs(outputs, targets["actions"])
        clip_range = targets.get("clip_range", self.clip_range)
        loss = ppo_policy_loss(log_probs, old, targets["advantages"], clip_range, mask, self.clip_range_high)
        if self.value_coef:
            loss = loss + self.value_coef * self._value_loss(outputs, targets)
        if self.entropy_coef or "entropy_coef" in targets:
            entropy_coef = targets.get("entropy_coef", self.entropy_coef)
            loss = loss - entropy_coef * mean_of(self.entropies(outputs), mask)
        if "kl_coef" in targets:
            loss = loss + targets["kl_coef"] * divergence(old, log_probs, mask)
        return self._with_aux_loss(loss, outputs)

    def _value_loss(self, outputs: object, targets: Mapping[str, Array]) -> Array:
        values = values_of(outputs, targets["returns"].shape)
        mask = targets.get("mask")
        return ppo_value_loss(values, targets["values"], targets["returns"], self.value_clip_range, mask)

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> Mapping[str, Array]:
        """The metrics of `PolicyStrategy`, and `value_loss`."""
        return {**super().compute_metrics(outputs, batch), "value_loss": self._value_loss(outputs, batch.targets)}


def _normal(advantages: Tensor, mask: Tensor | None = None) -> Tensor:
    """The advantages shifted and scaled to mean 0 and standard deviation 1."""
    chosen = advantages if mask is None else advantages[mask]
    normal = (advantages - chosen.mean()) / (chosen.std(correction=0) + 1e-8)
    return normal if mask is None else torch.where(mask, normal, 0.0)
