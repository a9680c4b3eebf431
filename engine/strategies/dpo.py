"""Direct preference optimisation: learns to prefer the better of two answers, without a reward model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array, namespace, on_host
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.errors import ConfigurationError, refused, shortened
from pulsetrain.engine.losses import dpo_loss, implicit_rewards
from pulsetrain.engine.losses.tokens import masked_sum_log_probs, token_log_probs
from pulsetrain.engine.step.protocols import TrainingBatch, Tree
from pulsetrain.engine.strategies.language import logits_of
from pulsetrain.engine.strategies.reference import Reference, ReferenceModel, WithReference

__all__ = ["DPOStrategy"]

_REMEDY = (
    "a batch of pairs has chosen_input_ids, chosen_labels, rejected_input_ids and rejected_labels, each of shape "
    "(pairs, length), as pulsetrain.engine.data.sequences.pad_examples makes them"
)
_STORED = "reference_chosen_log_probs", "reference_rejected_log_probs"
_STORED_MEANS = "reference_chosen_mean_log_probs", "reference_rejected_mean_log_probs"  # another number: another name


class DPOStrategy(WithReference):
    """Raises the probability of chosen answers over rejected ones, relative to a reference model.

    A batch is a mapping with "chosen_input_ids", "chosen_labels", "rejected_input_ids" and "rejected_labels", each of
    shape (pairs, length), with labels of -100 in prompts and padding. The reference's log-probabilities come from a
    frozen model or from the batch: "reference_chosen_log_probs" and "reference_rejected_log_probs", shape (pairs,), as
    `store_reference` computes them.

    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> pair = {"chosen_input_ids": tokens, "chosen_labels": torch.tensor([[-100, -100, 3]])}
    >>> pair |= {"rejected_input_ids": tokens, "rejected_labels": torch.tensor([[-100, -100, 3]])}
    >>> strategy = DPOStrategy(reference_free=True)
    >>> batch = strategy.prepare_batch(pair)
    >>> strategy.compute_loss(torch.zeros(2, 2, 5), batch)  # equal probabilities: log 2
    tensor(0.6931)

    Args:
        beta: how closely the policy is held to the reference; the implicit reward is beta times the log-ratio.
        loss_type: "sigmoid" (Rafailov 2023), "hinge" (Zhao 2023) or "ipo" (Azar 2023, on means over the answers'
            tokens).
        label_smoothing: the assumed share of pairs with the wrong preference (Mitchell 2023).
        reference_free: use no reference.
        reference: "copy" of the model at the time training is set up (for a model with adapters: itself without
            them), a model, or None if every batch contains stored log-probabilities.

    Raises:
        ConfigurationError: a value is out of range; the message names it.
    """

    def __init__(
        self,
        beta: float = 0.1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        *,
        reference_free: bool = False,
        reference: ReferenceModel = "copy",
    ) -> None:
        super().__init__()
        self.beta, self.loss_type, self.label_smoothing = beta, loss_type, label_smoothing
        self.reference_free = reference_free
        self._stored = _STORED_MEANS if loss_type == "ipo" else _STORED
        if reference_free and reference not in ("copy", None):
            raise ConfigurationError(
                "uses no reference; leave one of them out",
                "DPOStrategy",
                reference_free=True,
                reference=shortened(reference),
            )
        self._reference = Reference(None if reference_free else reference, "DPOStrategy")
        zeros = torch.zeros(1)
        dpo_loss(zeros, zeros, None, None, beta, loss_type, label_smoothing)  # rejects wrong values now

    def prepare_batch(self, batch: Mapping[str, Tensor] | TrainingBatch, check: bool = False) -> TrainingBatch:
        """Stacks chosen rows and rejected rows for one forward pass; the targets include the reference's values.

        Raises:
            TypeError: a field is missing, or is not a tensor of token ids.
            ValueError: shapes do not fit, an answer has no labels, rows exceed the model's context, the reference has a
                different vocabulary, or stored log-probabilities are not finite.
        """
        if isinstance(batch, TrainingBatch):
            return batch
        read = {side: self._read(batch, side, check) for side in ("chosen", "rejected")}
        pairs = len(read["chosen"][0])
        if len(read["rejected"][0]) != pairs:
            raise ValueError(
                f"DPOStrategy: {pairs} chosen rows and {len(read['rejected'][0])} rejected ones; {_REMEDY}"
            )
        length = max(tokens.shape[1] for tokens, _ in read.values())
        tokens = torch.cat([_padded(tokens, length, 0) for tokens, _ in read.values()])
        labels = torch.cat([_padded(labels, length - 1, IGNORED) for _, labels in read.values()])
        inputs = self._inputs(tokens[:, :-1])
        targets = {"labels": labels}
        if not self.reference_free:
            targets["reference"] = self._reference_log_probs(batch, inputs, labels, check)
        return TrainingBatch(inputs, targets, pairs, labels.numel(), pairs)

    def _read(self, batch: Mapping[str, Tensor], side: str, check: bool) -> tuple[Tensor, Tensor]:
        name = f"{side}_input_ids"
        tokens = self._tokens(name, self._field(batch, name, _REMEDY), check)
        if batch.get(f"{side}_position_ids") is not None:
            raise ValueError(
                f"DPOStrategy: '{side}_position_ids' mark rows of several documents, but a row needs to be one answer; "
                "do not pack pairs"
            )
        labels = self._field(batch, f"{side}_labels", _REMEDY)
        if labels.shape == tokens.shape:  # else it is refused
            labels = self._without_padding(batch, labels, check, f"{side}_attention_mask")
        remedy = "cut prompts so that some of the answer is left, or leave such pairs out"
        return tokens, self._labels(f"{side}_labels", labels, tokens, remedy, check)

    def _reference_log_probs(self, batch: Mapping[str, Tensor], inputs: Tree, labels: Tensor, check: bool) -> Tensor:
        """The reference's log-probability of each row, shape (2 pairs,)."""
        if not any(name in batch for name in self._stored):
            if self._reference.given is None:
                self._field(batch, self._stored[0], "store_reference computes it; or let the strategy keep a reference")
            found: Tensor = self._sums(self._reference.log_probs(inputs, _looked_up(labels)), labels)
            return found
        parts = [self._field(batch, name, "store_reference computes both") for name in self._stored]
        for name, part in zip(self._stored, parts, strict=True):
            if part.shape != (len(labels) // 2,):
                raise ValueError(
                    f"DPOStrategy: {name!r} has shape {tuple(part.shape)}, and there are {len(labels) // 2} pairs; one "
                    "number for each"
                )
        stored = torch.cat(parts)
        if (check or on_host(stored)) and not stored.isfinite().all():
            raise ValueError("DPOStrategy: stored log-probabilities of the reference are not finite; store them again")
        return stored

    def _sums(self, log_probs: Array, labels: Array) -> Array:
        return masked_sum_log_probs(log_probs, labels != IGNORED, average=self.loss_type == "ipo")

    def store_reference(self, batches: Iterable[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The batches with the reference's log-probabilities, computed once for all epochs.

        Train on them, as a list or a custom dataset, with a strategy with reference=None and the same loss_type.

        Raises:
            ConfigurationError: there is no reference.
        """
        if self.reference_free:
            rule = "uses no reference, so store_reference() has nothing to store; train on the batches as they are"
            raise refused(self, rule, "reference_free")
        stored: list[dict[str, Tensor]] = []
        for batch in batches:
            fields = {name: self._reference.placed(value) for name, value in batch.items() if name not in self._stored}
            found = self.prepare_batch(fields, check=True).targets["reference"].cpu()
            stored.append({**batch, **dict(zip(self._stored, found.chunk(2), strict=True))})
        return stored

    def check_batch(self, outputs: object, batch: TrainingBatch) -> None:
        """Rejects labels outside the vocabulary; it waits for the device.

        Raises:
            ValueError: names the first such label, its index, and how many there are.
        """
        self._check_inputs(outputs, batch.inputs)
        self._check_tokens(outputs, batch.targets["labels"])

    def compute_loss(self, outputs: object, batch: TrainingBatch, check: bool = False) -> Array:
        """The mean loss of the pairs, shape ()."""
        if check:
            self.check_batch(outputs, batch)
        (chosen, rejected), references = self._sides(outputs, batch)
        loss = dpo_loss(chosen, rejected, *references, self.beta, self.loss_type, self.label_smoothing)
        return self._with_aux_loss(loss, outputs)

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> Mapping[str, Array]:
        """Means over the pairs.

        `reward_accuracy`: the share of pairs whose chosen answer has the larger implicit reward; `reward_margin`: the
        difference; `chosen_reward` and `rejected_reward`: the rewards, in nats times beta.
        """
        policies, references = self._sides(outputs, batch)
        chosen, rejected = (implicit_rewards(p, r, self.beta) for p, r in zip(policies, references, strict=True))
        xp = namespace(chosen)
        return {
            "reward_accuracy": xp.mean(xp.astype(chosen > rejected, xp.float32)),
            "reward_margin": xp.mean(chosen - rejected),
            "chosen_reward": xp.mean(chosen),
            "rejected_reward": xp.mean(rejected),
        }

    def _sides(self, outputs: object, batch: TrainingBatch) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Log-probabilities of the chosen and the rejected answers under the policy and under the reference."""
        labels = batch.targets["labels"]
        xp = namespace(labels)
        found = self._sums(token_log_probs(logits_of(outputs), _looked_up(labels)), labels)
        pairs = labels.shape[0] // 2
        counts = xp.any(labels != IGNORED, axis=-1)
        both = counts[:pairs] & counts[pairs:]  # a pair with one empty answer must not count: see prepare_batch
        found = xp.where(xp.concat([both, both]), found, 0.0)
        reference = batch.targets.get("reference")
        references = (None, None) if reference is None else (reference[:pairs], reference[pairs:])
        return (found[:pairs], found[pairs:]), references


def _looked_up(labels: Array) -> Array:
    """Labels with token 0 in place of ignored ones, so that they can be looked up."""
    return namespace(labels).where(labels == IGNORED, 0, labels)


def _padded(rows: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, length - rows.shape[1]), value=value)
