"""Base class of the strategies that learn from the policy's own rollouts, PPO and GRPO."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pulsetrain.engine.argument_checks import check_number, check_positive, check_whole_number
from pulsetrain.engine.arrays import Array, all_finite, on_host
from pulsetrain.engine.losses import clip_fraction, entropy, kl_estimate
from pulsetrain.engine.losses.masks import mean_of, zero_outside
from pulsetrain.engine.losses.tokens import token_log_probs
from pulsetrain.engine.step.protocols import TrainingBatch, Tree
from pulsetrain.engine.strategies.language import logits_of
from pulsetrain.engine.strategies.reference import Reference, ReferenceModel, WithReference

__all__ = ["PolicyStrategy"]

_REMEDY = (
    "pulsetrain.engine.rollouts makes such batches: give the Trainer EnvironmentRollouts or TextRollouts as its "
    "train_loader"
)

_NUMBERS = ("kl_coef", "clip_range", "entropy_coef")  # of a whole rollout, shape ()


class PolicyStrategy(WithReference):
    """Uses the rows of a rollout several times, as long as the policy stays near the one that acted.

    Args:
        kl_coef: weight of the divergence from the reference.
        clip_range: how far the probability ratio may move before its gradient is clipped.
        clip_range_high: the same upwards, if different.
        minibatch_epochs: how often each row of a rollout is used.
        minibatch_size: rows in a batch; None uses a whole rollout.
        target_kl: ends a rollout if the policy is further than this from the one that acted, in nats per action; it is
            checked after each of the minibatch epochs. None never ends one early.
        temperature: divides the logits, in acting and in training.
        reference: "copy" of the model at the time training is set up (for a model with adapters: a copy of those
            alone), a model, or None. It is used if tokens are generated and kl_coef is not 0.

    Raises:
        ConfigurationError: a value is out of range; the message names it.
    """

    kl_coef: float
    clip_range: float
    clip_range_high: float | None
    minibatch_epochs: int
    minibatch_size: int | None
    target_kl: float | None
    temperature: float

    needs_values = False  # whether the model must return a value besides the logits of each action
    group_size = 1  # answers to one prompt
    _row_fields: tuple[str, ...] = ("log_probs", "advantages")  # that a batch needs besides inputs and actions
    _remedy = _REMEDY

    def __init__(
        self,
        kl_coef: float,
        clip_range: float,
        *,
        clip_range_high: float | None,
        minibatch_epochs: int,
        minibatch_size: int | None,
        target_kl: float | None,
        temperature: float,
        reference: ReferenceModel,
    ) -> None:
        super().__init__()
        check_number(self._place, "kl_coef", kl_coef)
        check_positive(self._place, "clip_range", clip_range, below=1.0)
        check_positive(self._place, "temperature", temperature)
        for name, value in (("clip_range_high", clip_range_high), ("target_kl", target_kl)):
            check_positive(self._place, name, value, or_none=True)
        check_whole_number(self._place, "minibatch_epochs", minibatch_epochs)
        check_whole_number(self._place, "minibatch_size", minibatch_size, or_none=True)
        self.kl_coef, self.clip_range, self.clip_range_high = kl_coef, clip_range, clip_range_high
        self.minibatch_epochs, self.minibatch_size = minibatch_epochs, minibatch_size
        self.target_kl, self.temperature = target_kl, temperature
        self._reference = Reference(reference if kl_coef else None, self._place)

    # --------------------------------------------------------------------------------------------------- for rollouts

    def model_inputs(self, tokens: Tensor) -> object:
        """The inputs for a language model to score the tokens that follow `tokens`, shape (batch, length)."""
        return self._inputs(tokens)

    def action_log_probs(self, outputs: object, actions: Array) -> Array:
        """The log-probabilities of actions or tokens, in nats, in their shape.

        >>> from pulsetrain.engine.strategies import GRPOStrategy
        >>> import torch
        >>> GRPOStrategy().action_log_probs(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]))
        tensor([[-1.3863, -1.3863]])
        """
        return token_log_probs(self.scores(outputs), actions)

    def entropies(self, outputs: object) -> Array:
        """The entropies of the distributions of actions or tokens, in nats."""
        return entropy(self.scores(outputs))

    def scores(self, outputs: object) -> Array:
        """The logits from which actions are drawn, after the temperature."""
        logits = logits_of(outputs)
        return logits if self.temperature == 1.0 else logits / self.temperature

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model."""
        return self._reference.given is not None

    def reference_log_probs(self, inputs: Tree, tokens: Tensor) -> Tensor | None:
        """The reference's log-probabilities of tokens; None if there is no reference."""
        if not self.has_reference:
            return None
        return self._reference.log_probs(inputs, tokens, self.temperature)

    def learn_from(self, rollout: Mapping[str, Tensor], kl_coef: float) -> dict[str, Tensor]:
        """The rows that batches are made from; each field has one entry per row.

        Args:
            rollout: see `pulsetrain.engine.rollouts`.
            kl_coef: the current coefficient.
        """
        raise NotImplementedError

    def minibatch(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows of a whole batch, before several processes share them out, as they are to be used."""
        return rows

    def scheduled(self, rollouts: int) -> dict[str, float]:
        """The numbers that follow a schedule, by their names, after this number of rollouts."""
        return {}

    @property
    def can_learn_in_one_pass(self) -> bool:
        """Whether rows that are used once need no log-probabilities besides those of the pass that trains."""
        return False

    def take_measured(self) -> dict[str, float]:
        """The metrics, by full names, that the last such pass has measured; they are returned once."""
        return {}

    def adapted(self, kl_coef: float, kl: float) -> float:
        """The coefficient for the next rollout, after one with divergence `kl`."""
        return kl_coef

    # --------------------------------------------------------------------------------------------------- for training

    def prepare_batch(self, batch: Mapping[str, Tensor] | TrainingBatch, check: bool = False) -> TrainingBatch:
        """Rows of a rollout: the policy's inputs as inputs, all other fields as targets.

        Raises:
            TypeError: a field is missing, or is not a tensor.
            ValueError: shapes do not fit, a row has no generated token, or numbers are not finite.
        """
        if isinstance(batch, TrainingBatch):
            return batch
        text = isinstance(batch, Mapping) and not any(str(name).startswith("observations") for name in batch)
        targets = {name: self._field(batch, name, _REMEDY) for name in self._row_fields}
        targets |= {name: batch[name] for name in ("log_probs", *_NUMBERS) if name in batch and name not in targets}
        rows, inputs = self._seen(batch, targets, check) if text else self._observed(batch, targets)
        shape = targets["actions"].shape
        for name, value in targets.items():
            if name not in _NUMBERS:
                self._check_shape(name, value, shape, _REMEDY, "actions", shape[:1], shape[:-1])
            if value.is_floating_point() and (check or on_host(value)) and not all_finite(value):
                wrong = int((~value.isfinite()).sum())
                raise ValueError(
                    f"{self._place}: {wrong} of {value.numel()} {name!r} are not finite; check the rewards and "
                    "what the model gives"
                )
        mask = targets.get("mask")
        weight = rows if mask is None else self._weight(targets)
        return TrainingBatch(inputs, targets, rows, 0 if mask is None else mask.numel(), weight)

    def _weight(self, targets: Mapping[str, Tensor]) -> int | Tensor:
        """The number of items that the loss over texts is a mean over."""
        return targets["mask"].sum()

    def _seen(self, batch: Mapping[str, Tensor], targets: dict[str, Tensor], check: bool) -> tuple[int, Tree]:
        tokens = self._tokens("input_ids", self._field(batch, "input_ids", _REMEDY), check)
        generated = self._field(batch, "completion_mask", _REMEDY)
        rule = "one for each token, true where it was generated"
        self._check_shape("completion_mask", generated, tokens.shape, rule)
        mask = generated[:, 1:].bool()
        if (check or on_host(mask)) and not mask.any(1).all():
            row = int((~mask.any(1)).nonzero()[0])
            raise ValueError(
                f"{self._place}: 'completion_mask' of row {row} masks all of it: nothing was generated there; leave "
                "such rows out"
            )
        targets["actions"], targets["mask"] = tokens[:, 1:], mask
        return tokens.shape[0], self._inputs(tokens[:, :-1])

    def _observed(self, batch: Mapping[str, Tensor], targets: dict[str, Tensor]) -> tuple[int, Tree]:
        """The rows of steps in environments and the model's inputs; adds their actions to the targets."""
        raise NotImplementedError

    def check_batch(self, outputs: object, batch: TrainingBatch) -> None:
        """Rejects actions that the model has no logits for; it waits for the device.

        Raises:
            ValueError: names the first one, its index, and how many there are.
        """
        if "mask" in batch.targets:  # texts
            self._check_inputs(outputs, batch.inputs)
        self._check_tokens(outputs, batch.targets["actions"])

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> Mapping[str, Array]:
        """Means over actions: `kl` to the policy that acted, nats; `clip_fraction`; `entropy`, nats."""
        targets = batch.targets
        log_probs = self.action_log_probs(outputs, targets["actions"])
        old, mask = targets.get("log_probs", log_probs), targets.get("mask")
        clip_range = targets.get("clip_range", self.clip_range)
        return {
            "kl": divergence(old, log_probs, mask),
            "clip_fraction": self._clip_fraction(log_probs, old, mask, clip_range),
            "entropy": mean_of(self.entropies(outputs), mask),
        }

    def _clip_fraction(self, log_probs: Array, old: Array, mask: Array | None, clip_range: float | Array) -> Array:
        return clip_fraction(log_probs, old, clip_range, mask, self.clip_range_high)


def divergence(old: Array, log_probs: Array, mask: Array | None) -> Array:
    """KL from the policy that acted to the current one, in nats per action, shape ()."""
    return mean_of(kl_estimate(zero_outside(old, mask), zero_outside(log_probs, mask), "k3"), mask)
