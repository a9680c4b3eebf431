"""Base class of the strategies whose loss is the cross entropy of the next token."""

from __future__ import annotations

from collections.abc import Mapping

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.losses import check_first_batch, get_loss
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.engine.strategies.language import LanguageStrategy, logits_of

__all__ = ["NextTokenStrategy"]


class NextTokenStrategy(LanguageStrategy):
    """Base class of pretraining and fine-tuning: targets are tokens, or -100 where nothing is trained on.

    Args:
        loss_options: keywords of `pulsetrain.engine.losses.cross_entropy`.

    Raises:
        ConfigurationError: an option is unknown.
    """

    def __init__(self, loss_options: Mapping[str, object] | None) -> None:
        super().__init__()
        options = loss_options or {}
        self._loss = get_loss("cross_entropy", **options)
        # whether the loss is only the cross entropy, so that perplexity and bits per byte follow from it
        self._plain = not any(options.get(name) for name in ("label_smoothing", "z_loss"))

    def check_batch(self, outputs: object, batch: TrainingBatch) -> None:
        """Rejects tokens outside the vocabulary; it waits for the device.

        Args:
            outputs: the model's outputs, or any object with their `shape`: a backend that compiles `compute_loss`,
                where values cannot be read, calls this beforehand.

        Raises:
            ValueError: names the first such token, its index, and how many there are.
        """
        self._check_inputs(outputs, batch.inputs)
        check_first_batch(self._loss, logits_of(outputs), batch.targets)

    def compute_loss(self, outputs: object, batch: TrainingBatch, check: bool = False) -> Array:
        """The cross entropy in nats per trained token, shape ()."""
        if check:
            self.check_batch(outputs, batch)
        return self._loss(logits_of(outputs), batch.targets)
