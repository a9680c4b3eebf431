"""What the strategies share whose loss is the cross entropy of the next token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.losses import check_first_batch, get_loss
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.engine.strategies.language import LanguageStrategy, logits_of

__all__ = ["NextTokenStrategy"]


class NextTokenStrategy(LanguageStrategy):
    """Base of pretraining and fine-tuning: targets are tokens, or -100 where nothing is to be learnt.

    Args:
        loss_options: keywords of `pulsetrain.engine.losses.cross_entropy`.

    Raises:
        ConfigurationError: an unknown option.
    """

    def __init__(self, loss_options: Mapping[str, Any] | None) -> None:
        super().__init__()
        options = loss_options or {}
        self._loss = get_loss("cross_entropy", **options)
        # whether the loss is the cross entropy alone, so that perplexity and bits follow from it
        self._plain = not any(options.get(name) for name in ("label_smoothing", "z_loss"))

    def check_batch(self, outputs: Any, batch: TrainingBatch) -> None:
        """Refuse tokens that are not in the vocabulary; it waits for the device.

        Args:
            outputs: of the model, or anything else with their `shape`: a backend that compiles `compute_loss`, where no
                value can be looked at, asks beforehand.

        Raises:
            ValueError: it names the first such token, where it stands, and how many there are.
        """
        self._check_inputs(outputs, batch.inputs)
        check_first_batch(self._loss, logits_of(outputs), batch.targets)

    def compute_loss(self, outputs: Any, batch: TrainingBatch, check: bool = False) -> Array:
        """Cross entropy, nats a token that is to be learnt, shape ()."""
        if check:
            self.check_batch(outputs, batch)
        return self._loss(logits_of(outputs), batch.targets)
