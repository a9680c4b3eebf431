"""Supervised fine-tuning: learns the answers to prompts, not the prompts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array, masked_mean, namespace
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.losses.tokens import entropy
from pulsetrain.engine.step.model_outputs import logits_of
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.engine.strategies.language import NextTokenStrategy

__all__ = ["SFTStrategy"]

_REMEDY = (
    "pulsetrain.engine.data.chat.tokenize_chat and pulsetrain.engine.data.sequences.pad_examples or pack make such "
    "batches"
)


class SFTStrategy(NextTokenStrategy):
    """Predicts the tokens of answers from all tokens before them.

    A batch is a mapping with "input_ids" and "labels", both of shape (batch, length); a label is the token at its
    position, or -100 where nothing is trained on: prompts and padding. Rows with several documents also have
    "position_ids", which restart at 0 with each: no document sees another, and a document's first token is not
    predicted. Further tensors are keyword arguments of the model, if its forward accepts them by name.

    The loss is the mean over the trained tokens, and a batch's weight is their number: gradients accumulated over
    several batches are those of the mean over all their tokens, not of a mean of means.

    >>> strategy = SFTStrategy()
    >>> tokens, labels = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[-100, -100, 3, 4]])
    >>> batch = strategy.prepare_batch({"input_ids": tokens, "labels": labels})
    >>> batch.targets, batch.weight
    (tensor([[-100,    3,    4]]), tensor(2))

    Args:
        loss_options: keywords of `pulsetrain.engine.losses.cross_entropy`, such as label_smoothing, z_loss, or
            chunk_size for a large vocabulary.
        aux_loss_coef: weight of the auxiliary loss of a mixture of experts; 0 leaves it out. None: as the model's
            configuration says, see `LanguageStrategy`.

    Raises:
        ConfigurationError: an option is unknown.
    """

    def __init__(self, loss_options: Mapping[str, object] | None = None, aux_loss_coef: float | None = None) -> None:
        super().__init__(loss_options, aux_loss_coef)
        self.loss_unit = "nats/token"

    def prepare_batch(self, batch: Mapping[str, Tensor] | TrainingBatch, check: bool = False) -> TrainingBatch:
        """Inputs are all tokens but the last, targets the labels of all but the first.

        Raises:
            TypeError: a field is missing, is not a tensor of token ids, or is one that the model does not accept.
            ValueError: a row has no trained token, or rows exceed the model's context.
        """
        if isinstance(batch, TrainingBatch):
            return batch
        tokens = self._tokens("input_ids", self._field(batch, "input_ids", _REMEDY), check)
        positions = self._positions(batch, tokens)
        labels = self._field(batch, "labels", _REMEDY + "; to train on every token use PretrainStrategy")
        if labels.shape == tokens.shape:  # otherwise _labels rejects it
            labels = self._without_padding(batch, labels, check)
            if positions is not None:
                labels = torch.where(positions == 0, IGNORED, labels)
        labels = self._labels(
            "labels", labels, tokens, "cut prompts so that some of the answer is left, or leave such rows out", check
        )
        seen, places = tokens[:, :-1], None if positions is None else positions[:, :-1]
        inputs = self._inputs(seen, places, self._further(batch, tokens, positions))
        return TrainingBatch(inputs, labels, tokens.shape[0], seen.numel(), (labels != IGNORED).sum())

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> dict[str, Array]:
        """`token_accuracy`: the share of trained tokens that are the most likely ones; `entropy`: of the predictions.

        The entropy is a mean over the trained tokens, in nats. If the loss includes label smoothing, a z-loss or an
        auxiliary loss, also `cross_entropy`, in nats per token.
        """
        logits, labels = logits_of(outputs), batch.targets
        xp, trained = namespace(logits, labels), labels != IGNORED
        right = xp.astype(xp.argmax(logits, axis=-1) == labels, xp.float32)
        # in torch row by row: of all rows at once it would take several times the memory of the logits
        spread = torch.stack([entropy(row) for row in logits]) if isinstance(logits, Tensor) else entropy(logits)
        means = {"token_accuracy": masked_mean(right, trained), "entropy": masked_mean(spread, trained)}
        return {**super().compute_metrics(outputs, batch), **means}
