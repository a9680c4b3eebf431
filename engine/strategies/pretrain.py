"""Next-token prediction over plain sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from engine.arrays import Array, require_tensor
from engine.errors import ConfigurationError
from engine.losses import check_first_batch, get_loss
from engine.metrics import bits_per_byte, perplexity
from engine.protocols import TrainingBatch

__all__ = ["PretrainStrategy"]

Number = TypeVar("Number", float, Tensor)


class PretrainStrategy:
    """Predict each token from those before it.

    A batch is a tensor of token numbers, shape (batch, length + 1), or a mapping with one under "input_ids". The model
    takes (batch, length) tokens and gives logits of shape (batch, length, vocabulary).

    Training and validation report the loss, perplexity, and bits_per_byte where the length of a token is known.

    Args:
        unit: what a token is, "token" or "byte"; the loss is in nats a unit.
        bytes_per_token: mean length of a token in the text, bytes; 1 where the unit is a byte.
        loss_options: keywords of `engine.losses.cross_entropy`, such as z_loss, or chunk_size for a large vocabulary.

    Raises:
        ConfigurationError: another unit, a length that is no positive number, or an unknown option.
    """

    def __init__(
        self,
        unit: str = "token",
        bytes_per_token: float | None = None,
        loss_options: Mapping[str, Any] | None = None,
    ) -> None:
        if unit not in ("token", "byte"):
            raise ConfigurationError(f"PretrainStrategy(unit={unit!r}): choose 'token' or 'byte'")
        if bytes_per_token is None and unit == "byte":
            bytes_per_token = 1.0
        if bytes_per_token is not None:
            bits_per_byte(0.0, bytes_per_token)  # refuses a wrong length now, not at the first log point
        self.unit = unit
        self.bytes_per_token = bytes_per_token
        self.loss_unit = f"nats/{unit}"
        self._loss = get_loss("cross_entropy", **(loss_options or {}))
        self.check_values = True  # of tokens, which waits for the device: see TrainingStrategy

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        """Inputs are all tokens but the last, targets all but the first: torch tensors, whatever computes afterwards.

        Raises:
            TypeError: no tensor of such a shape, or an array of another library.
        """
        if isinstance(batch, TrainingBatch):
            return batch
        tokens = batch
        if isinstance(batch, Mapping):
            if "input_ids" not in batch:
                raise TypeError(
                    f"PretrainStrategy: a batch with {', '.join(map(str, batch)) or 'no field'} lacks 'input_ids'; let "
                    "the loader give the tokens under that name, or as a tensor"
                )
            tokens = batch["input_ids"]
        if isinstance(tokens, (tuple, list)) and len(tokens) == 1:
            tokens = tokens[0]
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] < 2:
            require_tensor("PretrainStrategy", "tokens", tokens)
            shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(
                f"PretrainStrategy: a batch is a tensor of token numbers, shape (batch, length + 1), not {shape}"
            )
        rows, length = tokens.shape
        return TrainingBatch(tokens[:, :-1], tokens[:, 1:], rows, rows * (length - 1))

    def check_batch(self, outputs: Any, batch: TrainingBatch) -> None:
        """Refuse tokens that are not in the vocabulary; it waits for the device.

        Args:
            outputs: of the model, or anything else with their `shape`: a backend that compiles `compute_loss`, where no
                value can be looked at, asks beforehand.

        Raises:
            ValueError: it names the first such token, where it stands, and how many there are.
        """
        check_first_batch(self._loss, outputs, batch.targets)

    def compute_loss(self, outputs: Any, batch: TrainingBatch) -> Array:
        """Cross entropy, nats a token, shape ()."""
        if self.check_values:
            self.check_batch(outputs, batch)
        return self._loss(outputs, batch.targets)

    def compute_metrics(self, outputs: Any, batch: TrainingBatch) -> Mapping[str, Tensor]:
        """None that need the outputs: see `derive_metrics`."""
        return {}

    def derive_metrics(self, loss: Number) -> dict[str, Number]:
        """What follows from the mean loss alone: perplexity a token, and bits per byte where a token's length is known.

        A loss that is still on the device stays there.
        """
        derived = {"perplexity": perplexity(loss)}
        if self.bytes_per_token is not None:
            derived["bits_per_byte"] = bits_per_byte(loss, self.bytes_per_token)
        return derived
