"""Next-token prediction over plain sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from pulsetrain.engine.arrays import on_host
from pulsetrain.engine.data.sequences import IGNORED, restart_positions
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import cross_entropy
from pulsetrain.engine.metrics import bits_per_byte, perplexity
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.engine.strategies.language import logits_of
from pulsetrain.engine.strategies.next_token import NextTokenStrategy

__all__ = ["PretrainStrategy"]

Number = TypeVar("Number", float, Tensor)


class PretrainStrategy(NextTokenStrategy):
    """Predict each token from those before it.

    A batch is a tensor of token numbers, shape (batch, length + 1), or a mapping with one under "input_ids". The model
    takes (batch, length) tokens and gives logits of shape (batch, length, vocabulary).

    Where rows hold several documents, they are kept apart: by "position_ids" in the mapping, which begin at 0 with each
    (as `pulsetrain.engine.data.sequences.pack` makes them), or by the token that ends a document. The model gets
    position_ids, so that no document sees another, and a document's first token is predicted from nothing.

    Training and validation report the loss, perplexity, and bits_per_byte where the length of a token is known.

    Args:
        unit: what a token is, "token" or "byte"; the loss is in nats a unit.
        bytes_per_token: mean length of a token in the text, bytes; 1 where the unit is a byte.
        loss_options: keywords of `pulsetrain.engine.losses.cross_entropy`, such as z_loss, or chunk_size for a large
            vocabulary.
        separator: the token that ends each document; None takes each row for one, unless it comes with position_ids.

    Raises:
        ConfigurationError: another unit, a length that is no positive number, an unknown option, or a separator that is
            no token.
    """

    def __init__(
        self,
        unit: str = "token",
        bytes_per_token: float | None = None,
        loss_options: Mapping[str, Any] | None = None,
        separator: int | None = None,
    ) -> None:
        super().__init__(loss_options)
        if separator is not None and (not isinstance(separator, int) or isinstance(separator, bool) or separator < 0):
            raise ConfigurationError("needs the number of a token", "PretrainStrategy", separator=separator)
        if unit not in ("token", "byte"):
            raise ConfigurationError("choose 'token' or 'byte'", "PretrainStrategy", unit=unit)
        if bytes_per_token is None and unit == "byte":
            bytes_per_token = 1.0
        if bytes_per_token is not None:
            bits_per_byte(0.0, bytes_per_token)  # refuses a wrong length now, not at the first log point
        self.unit, self.separator = unit, separator
        self.bytes_per_token = bytes_per_token
        self.loss_unit = f"nats/{unit}"

    def prepare_batch(self, batch: Any, check: bool = False) -> TrainingBatch:
        """Inputs are all tokens but the last, targets all but the first: torch tensors, whatever computes afterwards.

        Raises:
            TypeError: no tensor of such a shape, or an array of another library.
            ValueError: rows longer than the model's context, fields of other shapes, or nothing to be learnt.
        """
        if isinstance(batch, TrainingBatch):
            return batch
        fields = batch if isinstance(batch, Mapping) else {"input_ids": batch}
        if "input_ids" not in fields:
            raise TypeError(
                f"PretrainStrategy: a batch with {', '.join(map(str, batch)) or 'no field'} lacks 'input_ids'; let "
                "the loader give the tokens under that name, or as a tensor"
            )
        tokens = fields["input_ids"]
        if isinstance(tokens, (tuple, list)) and len(tokens) == 1:
            tokens = tokens[0]
        tokens = self._tokens("tokens", tokens, check)
        rows, length = tokens.shape
        positions = self._positions(fields, tokens)
        if positions is None and self.separator is not None:
            positions = restart_positions(tokens, self.separator)
        if positions is None and "attention_mask" not in fields:
            return TrainingBatch(self._inputs(tokens[:, :-1]), tokens[:, 1:], rows, rows * (length - 1))
        targets = self._without_padding(fields, tokens, check)[:, 1:]
        seen = None
        if positions is not None:
            targets, seen = torch.where(positions[:, 1:] == 0, IGNORED, targets), positions[:, :-1]
        learnt = targets != IGNORED
        if (check or on_host(learnt)) and not learnt.any():
            raise ValueError(
                "PretrainStrategy: nothing is to be learnt of this batch: each of its tokens begins a document or is "
                "padding; look at the separator and at the masks"
            )
        return TrainingBatch(self._inputs(tokens[:, :-1], seen), targets, rows, rows * (length - 1), learnt.sum())

    def compute_metrics(self, outputs: Any, batch: TrainingBatch) -> Mapping[str, Tensor]:
        """What `derive_metrics` cannot tell, where the loss is more than the cross entropy: that, and bits per byte."""
        if self._plain:
            return {}
        nats = cross_entropy(logits_of(outputs), batch.targets)
        length = {} if self.bytes_per_token is None else {"bits_per_byte": bits_per_byte(nats, self.bytes_per_token)}
        return {"cross_entropy": nats, **length}

    def derive_metrics(self, loss: Number) -> dict[str, Number]:
        """What follows from the mean loss alone: perplexity a token, and bits per byte where a token's length is known.

        Nothing does where label smoothing or a z-loss is a part of it.

        A loss that is still on the device stays there.
        """
        if not self._plain:
            return {}
        derived = {"perplexity": perplexity(loss)}
        if self.bytes_per_token is not None:
            derived["bits_per_byte"] = bits_per_byte(loss, self.bytes_per_token)
        return derived
