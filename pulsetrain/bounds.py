"""How long a run is: its bound, and what that makes in iterations and updates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from engine import rng
from engine.batches import length_of
from engine.errors import ConfigurationError

if TYPE_CHECKING:
    from engine.protocols import Backend, TrainingStrategy
    from pulsetrain.config import TrainingConfig

__all__ = ["Bound"]

UNBOUNDED = 1 << 60  # iterations; for runs that something else ends


class Bound:
    """The bound that a configuration sets; `max_epochs=1` where it sets none."""

    def __init__(self, config: TrainingConfig, loader: Iterable[Any]) -> None:
        self.config = config
        self.epoch_length = length_of(loader)
        self._loader = loader
        self._tokens_a_batch: int | None = None

    @property
    def max_epochs(self) -> int | None:
        """The bound in epochs, or None where another one holds."""
        config = self.config
        others = (config.max_iterations, config.max_updates, config.max_tokens)
        return config.max_epochs or (1 if all(other is None for other in others) else None)

    @property
    def max_iterations(self) -> int | None:
        """The bound in batches that the loop can hold itself; None where it counts epochs."""
        if self.max_epochs is not None:
            return None
        if self.config.max_updates is not None:
            return self.config.max_updates * self.config.accumulate
        return self.config.max_iterations or UNBOUNDED

    @property
    def total_iterations(self) -> int | None:
        """How many batches the run will take, or None where that is not known."""
        if self.max_epochs is not None:
            return None if self.epoch_length is None else self.max_epochs * self.epoch_length
        if self.config.max_tokens is None:
            return self.max_iterations
        return math.ceil(self.config.max_tokens / self._tokens_a_batch) if self._tokens_a_batch else None

    @property
    def total_updates(self) -> int | None:
        """How many optimizer steps the run will take, or None where that is not known."""
        iterations = self.total_iterations
        return None if iterations is None else max(iterations // self.config.accumulate, 1)

    def check(self) -> None:
        """Refuse a run that could not learn.

        Raises:
            ConfigurationError: it would end before its first update, or needs to read an iterator twice.
        """
        config, total = self.config, self.total_iterations
        if self.epoch_length == 0:
            raise ConfigurationError(
                "Trainer(train_loader): has no batches; a DataLoader with drop_last drops a short one"
            )
        if total is not None and total < config.accumulate:
            raise ConfigurationError(
                f"TrainingConfig(accumulate={config.accumulate}): the run has {total} batches, which make no update; "
                "accumulate fewer, or train longer"
            )
        if self.max_epochs is not None and self.max_epochs > 1 and iter(self._loader) is self._loader:
            raise ConfigurationError(
                f"TrainingConfig(max_epochs={self.max_epochs}): the loader is an iterator, which can be read once; "
                "give a DataLoader or a list, or bound the run by max_iterations"
            )

    def measure(self, strategy: TrainingStrategy, backend: Backend) -> None:
        """Count the tokens of the first batch, for a bound in tokens; the generators are as they were afterwards.

        Raises:
            ConfigurationError: the strategy counts no tokens, or the data can be read only once.
        """
        if self.config.max_tokens is None or self._tokens_a_batch is not None:
            return
        if iter(self._loader) is self._loader:
            raise ConfigurationError(
                f"TrainingConfig(max_tokens={self.config.max_tokens}): the loader is an iterator, whose first batch "
                "cannot be looked at beforehand; give a DataLoader or a list, or bound the run by max_iterations"
            )
        before = rng.capture()
        try:
            batch = next(iter(self._loader), None)
        finally:
            rng.restore(before)
        if batch is None:
            raise ConfigurationError("Trainer(train_loader): gave no batch; it is empty")
        self._tokens_a_batch = strategy.prepare_batch(backend.to_device(batch)).tokens
        if not self._tokens_a_batch:
            raise ConfigurationError(
                f"TrainingConfig(max_tokens={self.config.max_tokens}): {type(strategy).__name__} counts no tokens; "
                "use max_epochs, max_iterations or max_updates"
            )
