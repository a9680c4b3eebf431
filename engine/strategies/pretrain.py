"""Next-token prediction over plain sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.errors import ConfigurationError
from engine.losses import get_loss
from engine.protocols import TrainingBatch

__all__ = ["PretrainStrategy"]


class PretrainStrategy:
    """Predict each token from those before it.

    A batch is a tensor of token numbers, shape (batch, length + 1), or a mapping with one under "input_ids". The model
    takes (batch, length) tokens and gives logits of shape (batch, length, vocabulary).

    Args:
        unit: what a token is, "token" or "byte"; the loss is in nats a unit, and for bytes validation also reports
            bits_per_byte.
    """

    def __init__(self, unit: str = "token") -> None:
        if unit not in ("token", "byte"):
            raise ConfigurationError(f"PretrainStrategy(unit={unit!r}): choose 'token' or 'byte'")
        self.unit = unit
        self.loss_unit = f"nats/{unit}"
        self._loss = get_loss("cross_entropy")

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        """Inputs are all tokens but the last, targets all but the first."""
        if isinstance(batch, TrainingBatch):
            return batch
        tokens = batch["input_ids"] if isinstance(batch, Mapping) else batch
        if isinstance(tokens, (tuple, list)) and len(tokens) == 1:
            tokens = tokens[0]
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] < 2:
            shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(
                f"PretrainStrategy: a batch is a tensor of token numbers, shape (batch, length + 1), not {shape}"
            )
        rows, length = tokens.shape
        return TrainingBatch(tokens[:, :-1], tokens[:, 1:], rows, rows * (length - 1))

    def compute_loss(self, outputs: Any, batch: TrainingBatch) -> Tensor:
        """Cross entropy, nats a token, shape ()."""
        return self._loss(outputs, batch.targets)

    def compute_metrics(self, outputs: Any, batch: TrainingBatch) -> Mapping[str, Tensor]:
        """None that need the outputs: see `derive_metrics`."""
        return {}

    def derive_metrics(self, loss: float) -> dict[str, float]:
        """What follows from the mean loss alone: perplexity a token, and bits per byte where tokens are bytes."""
        derived = {"perplexity": math.exp(min(loss, 700.0))}  # exp overflows above 709
        if self.unit == "byte":
            derived["bits_per_byte"] = loss / math.log(2)
        return derived
