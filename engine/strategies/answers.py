"""Base classes of the strategies over whole answers: they read their tokens, and sum their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array, masked_mean, namespace, on_host
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.errors import ConfigurationError, refused, shortened
from pulsetrain.engine.losses import implicit_rewards
from pulsetrain.engine.losses.tokens import masked_sum_log_probs, token_log_probs
from pulsetrain.engine.step.protocols import TrainingBatch, Tree
from pulsetrain.engine.strategies.fields_of_sides import fields_of_sides, padded_to
from pulsetrain.engine.strategies.language import logits_of
from pulsetrain.engine.strategies.reference import Reference, ReferenceModel, WithReference

__all__ = ["AnswerStrategy", "PairStrategy", "Scores", "metrics_of_rewards", "padded_to"]


class Scores(NamedTuple):
    """What a loss reads of the answers; the tuples have an array of shape (rows,) for each side, such as chosen."""

    policy: tuple[Array, ...]  # sums or means of log-probabilities, nats
    reference: tuple[Array | None, ...]  # the same under the reference
    tokens: tuple[Array, ...]  # how many are trained on
    log_probs: Array  # of the tokens of the first side, shape (rows, length)
    mask: Array  # true where those are trained on
    counted: Array  # whether no answer of the row is empty; the numbers of other rows are 0

    @property
    def cross_entropy(self) -> Array:
        """Of the tokens of the first side's answers, in nats per token, shape ()."""
        return -masked_mean(self.log_probs, self.mask & self.counted[:, None])

    def means(self) -> Scores:
        """The means of sums over the tokens of each answer."""
        where = namespace(self.counted).where
        counts = [where(self.counted, each, 1.0) for each in self.tokens]
        policy = tuple(each / count for each, count in zip(self.policy, counts, strict=True))
        reference = tuple(
            None if each is None else each / count for each, count in zip(self.reference, counts, strict=True)
        )
        return self._replace(policy=policy, reference=reference)


class AnswerStrategy(WithReference):
    """Base class of the strategies whose loss is a function of the log-probabilities of whole answers.

    Args:
        reference: see `ReferenceModel`.
        refers: whether the loss has a reference.

    Raises:
        ConfigurationError: a reference is given and not used.
    """

    _sides: tuple[str, ...] = ()  # the prefixes of the fields of a batch; each side has one answer in a row
    _remedy = ""
    _of_means = False  # whether the loss is of means over an answer's tokens, in place of sums

    def __init__(self, reference: ReferenceModel, *, refers: bool = True) -> None:
        super().__init__()
        self._refers = refers
        if not refers and reference not in ("copy", None):
            raise ConfigurationError(
                "uses no reference; leave one of them out",
                self._place,
                reference_free=True,
                reference=shortened(reference),
            )
        self._reference = Reference(reference if refers else None, self._place)

    @property
    def _stored(self) -> tuple[str, ...]:
        """The fields of a batch with the reference's log-probabilities; means are other numbers: other names."""
        kind = "mean_log_probs" if self._of_means else "log_probs"
        return tuple(f"reference_{side}{kind}" for side in self._sides)

    def prepare_batch(self, batch: Mapping[str, Tensor] | TrainingBatch, check: bool = False) -> TrainingBatch:
        """Stacks the rows of all sides for one forward pass; the targets include the reference's values.

        Raises:
            TypeError: a field is missing, is not a tensor of token ids, or is one that the model does not accept.
            ValueError: shapes do not fit, an answer has no labels, rows exceed the model's context, the reference has a
                different vocabulary, or stored log-probabilities are not finite.
        """
        if isinstance(batch, TrainingBatch):
            return batch
        read = {side: self._read(batch, side, check) for side in self._sides}
        first, rows = self._sides[0], len(read[self._sides[0]][0])
        for side, (tokens, _) in read.items():
            if len(tokens) != rows:
                raise ValueError(
                    f"{self._place}: {rows} rows of '{first}input_ids' and {len(tokens)} of '{side}input_ids'; "
                    f"{self._remedy}"
                )
        length = max(tokens.shape[1] for tokens, _ in read.values())
        tokens = torch.cat([padded_to(length, tokens, 0) for tokens, _ in read.values()])
        labels = torch.cat([padded_to(length - 1, labels, IGNORED) for _, labels in read.values()])
        fields = fields_of_sides(self, batch, {side: each for side, (each, _) in read.items()}, cut=True)
        inputs = self._inputs(tokens[:, :-1], None, fields)
        targets = {"labels": labels, **self._further_targets(batch, rows)}
        if self._refers:
            targets["reference"] = self._reference_log_probs(batch, inputs, labels, rows, check)
        return TrainingBatch(inputs, targets, rows, labels.numel(), rows)

    def _read(self, batch: Mapping[str, Tensor], side: str, check: bool) -> tuple[Tensor, Tensor]:
        name = f"{side}input_ids"
        tokens = self._tokens(name, self._field(batch, name, self._remedy), check)
        if batch.get(f"{side}position_ids") is not None:
            raise ValueError(
                f"{self._place}: '{side}position_ids' mark rows of several documents, but a row needs to be one "
                "answer; do not pack them"
            )
        labels = self._field(batch, f"{side}labels", self._remedy)
        if labels.shape == tokens.shape:  # else it is refused
            labels = self._without_padding(batch, labels, check, f"{side}attention_mask")
        remedy = "cut prompts so that some of the answer is left, or leave such rows out"
        return tokens, self._labels(f"{side}labels", labels, tokens, remedy, check)

    def _further_targets(self, batch: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        """What the loss reads besides, by name."""
        return {}

    def _reference_log_probs(
        self, batch: Mapping[str, Tensor], inputs: Tree, labels: Tensor, rows: int, check: bool
    ) -> Tensor:
        """The reference's log-probability of each row, shape (sides * rows,)."""
        names = self._stored
        if not any(name in batch for name in names):
            if self._reference.given is None:
                self._field(batch, names[0], "store_reference computes it; or let the strategy keep a reference")
            found: Tensor = self._sums(self._reference.log_probs(inputs, _looked_up(labels)), labels)
            return found
        parts = [self._field(batch, name, "store_reference computes both") for name in names]
        for name, part in zip(names, parts, strict=True):
            if part.shape != (rows,):
                raise ValueError(
                    f"{self._place}: {name!r} has shape {tuple(part.shape)}, and there are {rows} rows; one number "
                    "for each"
                )
        stored = torch.cat(parts)
        if (check or on_host(stored)) and not stored.isfinite().all():
            raise ValueError(
                f"{self._place}: stored log-probabilities of the reference are not finite; store them again"
            )
        return stored

    def _sums(self, log_probs: Array, labels: Array) -> Array:
        return masked_sum_log_probs(log_probs, labels != IGNORED, average=self._of_means)

    def store_reference(self, batches: Iterable[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The batches with the reference's log-probabilities, computed once for all epochs.

        Train on them, as a list or a custom dataset, with a strategy with reference=None and the same loss_type.

        Raises:
            ConfigurationError: there is no reference.
        """
        if not self._refers:
            rule = "uses no reference, so store_reference() has nothing to store; train on the batches as they are"
            if hasattr(self, "reference_free"):
                raise refused(self, rule, "reference_free")
            raise ConfigurationError(f"{self._place}: {rule}")
        stored: list[dict[str, Tensor]] = []
        for batch in batches:
            fields = {name: self._reference.placed(value) for name, value in batch.items() if name not in self._stored}
            found = self.prepare_batch(fields, check=True).targets["reference"].cpu()
            stored.append({**batch, **dict(zip(self._stored, found.chunk(len(self._sides)), strict=True))})
        return stored

    def check_batch(self, outputs: object, batch: TrainingBatch) -> None:
        """Rejects labels outside the vocabulary; it waits for the device.

        Raises:
            ValueError: names the first such label, its index, and how many there are.
        """
        self._check_inputs(outputs, batch.inputs)
        self._check_tokens(outputs, batch.targets["labels"])

    def compute_loss(self, outputs: object, batch: TrainingBatch, check: bool = False) -> Array:
        """The mean loss of the rows, shape ()."""
        if check:
            self.check_batch(outputs, batch)
        return self._with_aux_loss(self._loss(self._scores(outputs, batch), batch.targets), outputs)

    def _loss(self, scores: Scores, targets: Mapping[str, Array]) -> Array:
        raise NotImplementedError

    def _scores(self, outputs: object, batch: TrainingBatch) -> Scores:
        """Of the policy, from its outputs, and of the reference."""
        labels = batch.targets["labels"]
        xp = namespace(labels)
        log_probs = token_log_probs(logits_of(outputs), _looked_up(labels))
        found = self._sums(log_probs, labels)
        rows, mask = labels.shape[0] // len(self._sides), labels != IGNORED
        counts = xp.sum(xp.astype(mask, found.dtype), axis=-1)
        parts = [slice(rows * number, rows * (number + 1)) for number in range(len(self._sides))]
        counted = counts[parts[0]] > 0
        for part in parts[1:]:
            counted = counted & (counts[part] > 0)  # a row with an empty answer must not count: see prepare_batch
        reference = batch.targets.get("reference")
        return Scores(
            tuple(xp.where(counted, found[part], 0.0) for part in parts),
            tuple(None if reference is None else reference[part] for part in parts),
            tuple(counts[part] for part in parts),
            log_probs[:rows],
            mask[:rows],
            counted,
        )


class PairStrategy(AnswerStrategy):
    """Base class of the strategies over pairs of a chosen and a rejected answer.

    A batch is a mapping with "chosen_input_ids", "chosen_labels", "rejected_input_ids" and "rejected_labels", each of
    shape (pairs, length), with labels of -100 in prompts and padding.
    """

    _sides = ("chosen_", "rejected_")
    _remedy = (
        "a batch of pairs has chosen_input_ids, chosen_labels, rejected_input_ids and rejected_labels, each of shape "
        "(pairs, length), as pulsetrain.engine.data.preferences.pad_pairs makes them"
    )
    beta: float

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> Mapping[str, Array]:
        """Means over the pairs.

        `reward_accuracy`: the share of pairs whose chosen answer has the larger implicit reward; `reward_margin`: the
        difference; `chosen_reward` and `rejected_reward`: the rewards, in nats times beta.
        """
        scores = self._scores(outputs, batch)
        rewards = [implicit_rewards(p, r, self.beta) for p, r in zip(scores.policy, scores.reference, strict=True)]
        return metrics_of_rewards(*rewards)


def metrics_of_rewards(chosen: Array, rejected: Array) -> dict[str, Array]:
    """Means over pairs of answers, from their rewards, shape (pairs,)."""
    xp = namespace(chosen)
    return {
        "reward_accuracy": xp.mean(xp.astype(chosen > rejected, xp.float32)),
        "reward_margin": xp.mean(chosen - rejected),
        "chosen_reward": xp.mean(chosen),
        "rejected_reward": xp.mean(rejected),
    }


def _looked_up(labels: Array) -> Array:
    """Labels with token 0 in place of ignored ones, so that they can be looked up."""
    return namespace(labels).where(labels == IGNORED, 0, labels)
