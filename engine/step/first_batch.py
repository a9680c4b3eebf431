"""Checks the values of a run's first batches, which waits for the device; later batches are not checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.step.protocols import Strategy, TrainingBatch, TrainingStrategy

__all__ = ["FirstBatch"]

T = TypeVar("T")


class FirstBatch:
    """A strategy for the first batches of a run: `prepare_batch` and `compute_loss` are called with `check=True`.

    Any backend can be given one in the strategy's place. A method without a keyword `check` is called as it is.

    >>> class Positive:
    ...     def prepare_batch(self, batch, check=False):
    ...         if check and min(batch) < 0:
    ...             raise ValueError(f"{min(batch)} is negative")
    ...         return batch
    >>> FirstBatch(Positive()).prepare_batch([1, -2])
    Traceback (most recent call last):
    ValueError: -2 is negative
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy: TrainingStrategy = cast(TrainingStrategy, strategy)  # a backend asks for what its strategy has

    def prepare_batch(self, batch: object) -> TrainingBatch:
        """The strategy's batch, checked."""
        return _checked(self.strategy.prepare_batch, batch)

    def compute_loss(self, outputs: object, batch: TrainingBatch) -> Array:
        """The strategy's loss, checked."""
        return _checked(self.strategy.compute_loss, outputs, batch)

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> Mapping[str, Array]:
        """The strategy's metrics."""
        return self.strategy.compute_metrics(outputs, batch)

    def __getattr__(self, name: str) -> Any:  # what else a backend asks of its strategy
        return getattr(self.strategy, name)


def _checked(method: Callable[..., T], *arguments: object) -> T:
    options = {"check": True} if "check" in inspect.signature(method).parameters else {}
    return method(*arguments, **options)
