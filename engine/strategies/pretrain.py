"""Next-token prediction over plain sequences."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import is_whole
from pulsetrain.engine.arrays import Array, on_host
from pulsetrain.engine.data.sequences import IGNORED, restart_positions
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.metrics import bits_per_byte
from pulsetrain.engine.step.protocols import Number, TrainingBatch
from pulsetrain.engine.strategies.language import NextTokenStrategy

__all__ = ["PretrainStrategy"]


class PretrainStrategy(NextTokenStrategy):
    """Predicts each token from those before it.

    A batch is a tensor of token ids, shape (batch, length + 1), or a mapping with one under "input_ids". The model
    receives (batch, length) tokens and returns logits of shape (batch, length, vocabulary).

    If rows contain several documents, these are separated by "position_ids" in the mapping, which restart at 0 with
    each document (as in the rows of `pulsetrain.engine.data.sequences.pack`), or by the token that ends a document. The
    model receives position_ids, so that no document sees another, and a document's first token is not predicted.

    Every token is predicted, whatever "labels" a batch has. Further tensors are keyword arguments of the model, if its
    forward accepts them by name.

    Training and validation report the loss, perplexity, and bits_per_byte if the length of a token is known.

    >>> strategy = PretrainStrategy(unit="byte")
    >>> batch = strategy.prepare_batch(torch.tensor([[5, 6, 7]]))
    >>> batch.inputs, batch.targets
    (tensor([[5, 6]]), tensor([[6, 7]]))
    >>> strategy.compute_loss(torch.zeros(1, 2, 256), batch)  # log 256
    tensor(5.5452)

    Args:
        unit: the kind of token, "token" or "byte"; the loss is in nats per unit.
        bytes_per_token: the mean length of a token in the text in bytes; 1 if the unit is a byte.
        loss_options: keywords of `pulsetrain.engine.losses.cross_entropy`, such as z_loss, or chunk_size for a large
            vocabulary.
        separator: the token that ends each document; None treats each row as one, unless it has position_ids.
        aux_loss_coef: weight of the auxiliary loss of a mixture of experts; 0 leaves it out. None: as the model's
            configuration says, see `LanguageStrategy`.

    Raises:
        ConfigurationError: the unit or an option is unknown, the length is not a positive number, or the separator is
            not a token id.
    """

    separator: int | None

    def __init__(
        self,
        unit: str = "token",
        bytes_per_token: float | None = None,
        loss_options: Mapping[str, object] | None = None,
        separator: int | None = None,
        aux_loss_coef: float | None = None,
    ) -> None:
        super().__init__(loss_options, aux_loss_coef)
        if separator is not None and (not is_whole(separator) or separator < 0):
            raise ConfigurationError("needs a token id", "PretrainStrategy", separator=separator)
        if unit not in ("token", "byte"):
            raise ConfigurationError("choose 'token' or 'byte'", "PretrainStrategy", unit=unit)
        if bytes_per_token is None and unit == "byte":
            bytes_per_token = 1.0
        if bytes_per_token is not None:
            bits_per_byte(0.0, bytes_per_token)  # rejects a wrong length now, not at the first log point
        self.unit, self.separator = unit, separator
        self.bytes_per_token = bytes_per_token
        self.loss_unit = f"nats/{unit}"

    def prepare_batch(self, batch: Tensor | Mapping[str, Tensor] | TrainingBatch, check: bool = False) -> TrainingBatch:
        """Inputs are all tokens but the last, targets all but the first; torch tensors, also for other backends.

        Raises:
            TypeError: the tokens are not a tensor of such a shape, an array is of another library, or the model does
                not accept a field.
            ValueError: rows exceed the model's context, fields differ in shape, or no token is trained on.
        """
        if isinstance(batch, TrainingBatch):
            return batch
        fields: Mapping[str, Tensor] = batch if isinstance(batch, Mapping) else {"input_ids": batch}
        if "input_ids" not in fields:
            raise TypeError(
                f"PretrainStrategy: a batch with {', '.join(map(str, fields)) or 'no field'} lacks 'input_ids'; let "
                "the loader return the tokens under that name, or as a tensor"
            )
        tokens = fields["input_ids"]
        if isinstance(tokens, (tuple, list)) and len(tokens) == 1:
            tokens = tokens[0]
        tokens = self._tokens("tokens", tokens, check)
        rows, length = tokens.shape
        positions = self._positions(fields, tokens)
        if positions is None and self.separator is not None:
            positions = restart_positions(tokens, self.separator)
        further = self._further(fields, tokens, positions)
        if positions is None and "attention_mask" not in fields:
            return TrainingBatch(self._inputs(tokens[:, :-1], None, further), tokens[:, 1:], rows, rows * (length - 1))
        targets = self._without_padding(fields, tokens, check)[:, 1:]
        seen = None
        if positions is not None:
            targets, seen = torch.where(positions[:, 1:] == 0, IGNORED, targets), positions[:, :-1]
        learnt = targets != IGNORED
        if (check or on_host(learnt)) and not learnt.any():
            raise ValueError(
                "PretrainStrategy: nothing is trained on in this batch: each of its tokens starts a document or is "
                "padding; check the separator and the masks"
            )
        inputs = self._inputs(tokens[:, :-1], seen, further)
        return TrainingBatch(inputs, targets, rows, rows * (length - 1), learnt.sum())

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> dict[str, Array]:
        """If the loss is more than the cross entropy: the cross entropy, and bits per byte."""
        found = super().compute_metrics(outputs, batch)
        if found and self.bytes_per_token is not None:
            found["bits_per_byte"] = bits_per_byte(found["cross_entropy"], self.bytes_per_token)
        return found

    def derive_metrics(self, loss: Number) -> dict[str, Number]:
        """Metrics that follow from the mean loss: perplexity per token, and bits per byte if bytes_per_token is known.

        There are none if the loss includes label smoothing or a z-loss. A loss on the device stays there.

        >>> round(PretrainStrategy(unit="byte").derive_metrics(2.0)["bits_per_byte"], 4)
        2.8854
        """
        derived = super().derive_metrics(loss)
        if derived and self.bytes_per_token is not None:
            derived["bits_per_byte"] = bits_per_byte(loss, self.bytes_per_token)
        return derived
