"""Supervised fine-tuning: to answer, given a prompt that is not learnt itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array, masked_mean, namespace
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.losses import cross_entropy
from pulsetrain.engine.metrics import perplexity
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.engine.strategies.language import logits_of
from pulsetrain.engine.strategies.next_token import NextTokenStrategy

__all__ = ["SFTStrategy"]

Number = TypeVar("Number", float, Tensor)
_REMEDY = (
    "pulsetrain.engine.data.chat.tokenize_chat and pulsetrain.engine.data.sequences.pad_examples or pack make such "
    "batches"
)


class SFTStrategy(NextTokenStrategy):
    """Predict the tokens of answers from all tokens before them.

    A batch is a mapping with "input_ids" and "labels", both of shape (batch, length); a label is the token in its own
    place, or -100 where nothing is to be learnt: prompts, padding. Rows that hold several documents have "position_ids"
    as well, which begin at 0 with each: none sees another, and a document's first token is predicted from nothing.

    The loss is the mean over the tokens to be learnt, and batches weigh by their number of them: gradients accumulated
    over several batches are those of the mean over all their tokens, not of a mean of means.

    Args:
        loss_options: keywords of `pulsetrain.engine.losses.cross_entropy`, such as label_smoothing, z_loss, or
            chunk_size for a large vocabulary.

    Raises:
        ConfigurationError: an unknown option.
    """

    def __init__(self, loss_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(loss_options)
        self.loss_unit = "nats/token"

    def prepare_batch(self, batch: Any, check: bool = False) -> TrainingBatch:
        """Inputs are all tokens but the last, targets the labels of all but the first.

        Raises:
            TypeError: a field is missing, or is no tensor of token numbers.
            ValueError: a row of which nothing is to be learnt, or rows longer than the model's context.
        """
        if isinstance(batch, TrainingBatch):
            return batch
        tokens = self._tokens("input_ids", self._field(batch, "input_ids", _REMEDY), check)
        positions = self._positions(batch, tokens)
        labels = self._field(batch, "labels", _REMEDY + "; to learn every token is PretrainStrategy's")
        if labels.shape == tokens.shape:  # else it is refused
            labels = self._without_padding(batch, labels, check)
            if positions is not None:
                labels = torch.where(positions == 0, IGNORED, labels)
        labels = self._labels(
            "labels",
            labels,
            tokens,
            "cut prompts so that some of the answer is left, or leave such rows out",
            check,
        )
        seen = tokens[:, :-1]
        inputs = self._inputs(seen, None if positions is None else positions[:, :-1])
        return TrainingBatch(inputs, labels, tokens.shape[0], seen.numel(), (labels != IGNORED).sum())

    def compute_metrics(self, outputs: Any, batch: TrainingBatch) -> Mapping[str, Array]:
        """`token_accuracy`: how many of the tokens to be learnt are the likeliest.

        Where label smoothing or a z-loss is a part of the loss, `cross_entropy` as well, nats a token.
        """
        logits, labels = logits_of(outputs), batch.targets
        xp = namespace(logits, labels)
        right = xp.argmax(logits, axis=-1) == labels
        nats = {} if self._plain else {"cross_entropy": cross_entropy(logits, labels)}
        return {**nats, "token_accuracy": masked_mean(xp.astype(right, xp.float32), labels != IGNORED)}

    def derive_metrics(self, loss: Number) -> dict[str, Number]:
        """Perplexity a token, where the loss is the cross entropy alone."""
        return {"perplexity": perplexity(loss)} if self._plain else {}
