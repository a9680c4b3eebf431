"""In place of the training data, for a trainer that has none, since it only evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["NoTrainingData"]


class NoTrainingData:
    """Refuses to give batches."""

    def __iter__(self) -> Iterator[Any]:
        self.refuse()
        return iter(())

    def refuse(self) -> None:
        """Raise, with the remedy.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "the trainer was made without training data, to evaluate; make one with a train_loader, as "
            "Trainer(model, train_loader)",
            "Trainer",
            train_loader=None,
        )
