"""Group-relative policy optimisation (Shao 2024) and its family: compares the answers to one prompt with each other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_bool, check_choice, check_number, check_whole_number
from pulsetrain.engine.arrays import Array
from pulsetrain.engine.errors import ConfigurationError, raised_by, refused
from pulsetrain.engine.losses import (
    clip_fraction,
    entropy,
    gdpo_advantages,
    grpo_advantages,
    grpo_loss,
    mean_over_replies,
    rloo_advantages,
)
from pulsetrain.engine.losses.masks import mean_of
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.engine.strategies.policy import PolicyStrategy
from pulsetrain.engine.strategies.reference import ReferenceModel

__all__ = ["GRPOStrategy"]

_SCALES = {"grpo": "group", "rloo": "none", "gdpo": "group"}  # kind of advantages -> default of scale_rewards

_NEXT_TO_NONE = 1e-9  # tokens


class GRPOStrategy(PolicyStrategy):
    """Raises the probability of texts with a higher reward than the other texts for their prompt.

    The model returns logits of shape (batch, length, vocabulary).

    The family of GRPO differs in a few options (each may be combined with any other):

    - GSPO (Zheng 2025): `ratio="sequence"`, with a small range such as `clip_range=3e-4, clip_range_high=4e-4`;
    - CISPO (Chen 2025): `objective="cispo"`, `normalization="token_mean"`, `clip_range_high=4.0`;
    - RLOO (Ahmadian 2024): `advantages="rloo"`, `ratio="product"`;
    - DAPO (Yu 2025): `normalization="token_mean"`, `clip_range_high=0.28`, `mask_truncated=True`;
    - Dr. GRPO (Liu 2025): `normalization="dr_grpo"`, `scale_rewards="none"`;
    - GDPO (Liu 2026), for several rewards: `advantages="gdpo"`.

    A rollout that is one batch, used once, is trained on with one forward pass, and one of the reference if kl_coef is
    not 0: the policy that acted is the current one. The metrics "policy/entropy" and "rollout/reference_kl" are then
    those of that pass, before the update, and "policy/kl" and "policy/clip_fraction" are 0. For metrics after the
    update pass a target_kl, minibatches, or several epochs. A backend of values computes the passes separately.

    >>> strategy = GRPOStrategy(group_size=2, scale_rewards="none")
    >>> rollout = {"rewards": torch.tensor([1.0, 0.0]), "log_probs": torch.zeros(2, 3)}
    >>> rollout |= {"input_ids": torch.ones(2, 4).long(), "completion_mask": torch.ones(2, 4).bool()}
    >>> strategy.learn_from(rollout, kl_coef=0.0)["advantages"]
    tensor([ 0.5000, -0.5000])
    >>> GRPOStrategy(group_size=2, advantages="rloo").learn_from(rollout, kl_coef=0.0)["advantages"]
    tensor([ 1., -1.])

    Args:
        group_size: texts for each prompt.
        kl_coef: weight of the divergence from the reference in the loss; 0 needs no reference.
        clip_range: how far the probability ratio may move before its gradient is clipped.
        clip_range_high: the same upwards, if different (Yu 2025).
        objective: "clip", or "cispo", which bounds the weight of a token by 1 + clip_range_high and learns from it
            nevertheless; see `pulsetrain.engine.losses.grpo_loss`.
        ratio: the probability ratio of each "token", of the text as its geometric mean ("sequence"), or of the text as
            one action ("product"); see `grpo_loss`.
        normalization: the mean that the loss is: "sequence_mean", over texts, of each text's mean over its tokens (Shao
            2024); "token_mean", over all tokens (Yu 2025); "dr_grpo", over texts, of sums divided by max_length (Liu
            2025).
        max_length: the largest number of tokens of a text; for "dr_grpo".
        entropy_coef: weight of the entropy bonus: each token's loss is lowered by its entropy in nats times this.
        mask_truncated: whether texts that were cut at max_new_tokens, without their end token, are left out of the
            loss (Yu 2025). They still count as texts in the normalization, with a loss of 0, and in their groups.
        advantages: how texts of a group are compared: "grpo", with the group's mean; "rloo", with the mean of the
            others; "gdpo", for several rewards, each normalised within the group before their weighted sum.
        scale_rewards: divide by the standard deviation of the "group" or of the "batch", or "none" (Liu 2025). None
            means "group", and "none" for "rloo", which has no "group"; "gdpo" has only "group".
        minibatch_epochs: how often each text of a rollout is used.
        minibatch_size: texts in a batch; None uses a whole rollout.
        target_kl: ends a rollout's epochs early if the policy is further than this from the one that acted, in nats per
            token.
        temperature: divides the logits, in acting and in training.
        reference: "copy", a model, or None: see `PolicyStrategy`.

    Raises:
        ConfigurationError: a value is out of range; the message names it.
    """

    group_size: int
    advantages: str
    objective: str
    ratio: str
    entropy_coef: float
    normalization: str
    max_length: int | None
    mask_truncated: bool

    def __init__(
        self,
        group_size: int = 8,
        kl_coef: float = 0.0,
        clip_range: float = 0.2,
        *,
        clip_range_high: float | None = None,
        objective: str = "clip",
        ratio: str = "token",
        normalization: str = "sequence_mean",
        max_length: int | None = None,
        entropy_coef: float = 0.0,
        mask_truncated: bool = False,
        advantages: str = "grpo",
        scale_rewards: str | None = None,
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
        check_number("GRPOStrategy", "entropy_coef", entropy_coef)
        check_bool("GRPOStrategy", "mask_truncated", mask_truncated)
        check_choice("GRPOStrategy", "advantages", advantages, _SCALES)
        needed = {"reference_log_probs": kl_coef, "truncated": mask_truncated}
        self._row_fields = ("advantages", *(name for name, used in needed.items() if used))
        self._measured: dict[str, Tensor] = {}  # by the last loss over rows without log-probabilities
        self.group_size, self.advantages = group_size, advantages
        self.scale_rewards: str = _SCALES[advantages] if scale_rewards is None else scale_rewards
        self.objective, self.ratio, self.entropy_coef = objective, ratio, entropy_coef
        self.normalization, self.max_length, self.mask_truncated = normalization, max_length, mask_truncated
        check_choice("GRPOStrategy", "scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        if advantages == "rloo" and self.scale_rewards == "group":
            rule = "a text is compared with the others alone; choose 'batch' or 'none'"
            raise refused(self, rule, "scale_rewards", "advantages")
        if advantages == "gdpo" and self.scale_rewards != "group":
            raise refused(self, "'gdpo' always divides by each group's; leave it out", "scale_rewards", "advantages")
        rewards = torch.zeros(group_size, 1)
        row = {
            "log_probs": torch.zeros(1, 1), "advantages": torch.zeros(1), "mask": torch.ones(1, 1, dtype=torch.bool)
        }  # fmt: skip
        with raised_by("GRPOStrategy"):  # rejects wrong values now
            self._compared({"rewards": rewards[:, 0], "reward_parts": rewards, "reward_weights": torch.ones(1)})
            self._loss(torch.zeros(1, 1), row)

    def learn_from(self, rollout: Mapping[str, Tensor], kl_coef: float) -> dict[str, Tensor]:
        """The rows of a rollout with advantages within each group, one row per text.

        Raises:
            ConfigurationError: the rollout lacks what an option needs.
        """
        kept = ("input_ids", "completion_mask", "log_probs", "reference_log_probs")
        rows = {name: rollout[name] for name in kept if name in rollout}
        dtype = rollout["log_probs"].dtype if "log_probs" in rollout else torch.float32
        names = ("reward_parts", "reward_weights") if self.advantages == "gdpo" else ("rewards",)
        rewards = {name: self._of_rollout(rollout, name, "advantages").to(dtype) for name in names}
        if self.mask_truncated:
            rows["truncated"] = self._of_rollout(rollout, "truncated", "mask_truncated")
        return {**rows, "advantages": self._compared(rewards)}

    def _of_rollout(self, rollout: Mapping[str, Tensor], name: str, option: str) -> Tensor:
        if name not in rollout:
            raise refused(self, f"the rollout has no {name!r}; TextRollouts makes such", option)
        return rollout[name]

    def _compared(self, rollout: Mapping[str, Tensor]) -> Tensor:
        """The advantage of each text."""
        found: Tensor
        if self.advantages == "gdpo":
            found = gdpo_advantages(rollout["reward_parts"], rollout["reward_weights"], self.group_size)
        else:
            compare = rloo_advantages if self.advantages == "rloo" else grpo_advantages
            found = compare(rollout["rewards"], self.group_size, self.scale_rewards)
        return found

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

    def _weight(self, targets: Mapping[str, Tensor]) -> int | Tensor:
        if self.normalization != "token_mean":
            return len(targets["mask"])
        counted: Tensor = _counted(targets)
        total = counted.sum()
        # a batch whose texts were all truncated has the loss 0 and next to no weight; with none, its mean would be nan
        return total.float().clamp(min=_NEXT_TO_NONE) if "truncated" in targets else total

    def compute_loss(self, outputs: object, batch: TrainingBatch, check: bool = False) -> Array:
        """The objective plus the weighted divergence from the reference, minus the weighted entropy; shape ()."""
        if check:
            self.check_batch(outputs, batch)
        log_probs = self.action_log_probs(outputs, batch.targets["actions"])
        entropies = entropy(self.scores(outputs)) if self.entropy_coef else None
        if "log_probs" not in batch.targets:
            self._measured = self._measure(outputs, log_probs, batch.targets, entropies)
        loss = self._loss(log_probs, batch.targets)
        if entropies is not None:
            counted = _counted(batch.targets)
            loss = loss - self.entropy_coef * mean_over_replies(entropies, counted, self.normalization, self.max_length)
        return self._with_aux_loss(loss, outputs)

    @torch.no_grad()
    def _measure(
        self, outputs: object, log_probs: Tensor, targets: Mapping[str, Tensor], entropies: Tensor | None
    ) -> dict[str, Tensor]:
        """The metrics of the policy in the forward pass that trains it; on the device, nothing waits."""
        mask, none = targets["mask"], log_probs.new_zeros(())
        found = {"policy/kl": none, "policy/clip_fraction": none}
        found["policy/entropy"] = mean_of(entropy(self.scores(outputs)) if entropies is None else entropies, mask)
        if "reference_log_probs" in targets:
            found["rollout/reference_kl"] = mean_of(log_probs.detach() - targets["reference_log_probs"], mask)
        return found

    def _loss(self, log_probs: Array, targets: Mapping[str, Array]) -> Array:
        old = targets.get("log_probs", log_probs)  # grpo_loss detaches it
        return grpo_loss(
            log_probs, old, targets["advantages"], _counted(targets), self.clip_range, self.clip_range_high,
            self.normalization, self.max_length, targets.get("reference_log_probs"),
            self.kl_coef if "reference_log_probs" in targets else 0.0, ratio=self.ratio, objective=self.objective,
        )  # fmt: skip

    def _clip_fraction(self, log_probs: Array, old: Array, mask: Array | None, clip_range: float | Array) -> Array:
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        low = 1.0 if self.objective == "cispo" else clip_range  # no ratio is below 1 - 1.0
        return clip_fraction(log_probs, old, low, mask, high, ratio=self.ratio)


def _counted(targets: Mapping[str, Array]) -> Array:
    """The mask of the tokens that the loss counts, shape (batch, length)."""
    mask = targets["mask"]
    return mask & ~targets["truncated"][:, None] if "truncated" in targets else mask
