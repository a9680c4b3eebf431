"""What a handler may ask of the run that it is attached to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from pulsetrain.engine.events.engine import Engine
    from pulsetrain.engine.optimizers import NamedOptimizers
    from pulsetrain.engine.step.backend import Backend
    from pulsetrain.engine.step.protocols import AlternatingStrategy, TrainingStrategy

__all__ = ["BatchOrder", "TrainingRun", "is_training_run"]


class BatchOrder(Protocol):
    """Which rows of the data set each batch holds; a trainer's `data`."""

    pass_start: int
    """The iteration before the first batch of the current pass over the data."""

    def locate(self, iteration: int) -> tuple[int, int] | None:
        """Where in the data order a batch of the current pass is, for `rows_at`; None if the loader decides itself."""
        ...

    def rows_at(self, location: tuple[int, int]) -> list[Any]:
        """The data set's indices of the batch at that location."""
        ...

    def rows(self, iteration: int) -> list[Any] | None:
        """The data set's indices of a batch of the current pass; None if the loader decides itself."""
        ...


@runtime_checkable
class TrainingRun(Protocol):
    """A run that trains a model. `pulsetrain.Trainer` implements it; a plain Engine does not."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    optimizers: NamedOptimizers | None
    strategy: TrainingStrategy | AlternatingStrategy
    backend: Backend
    config: Any
    seed: int
    train_loader: Iterable[Any]
    val_loaders: Mapping[str, Iterable[Any]]
    handlers: Sequence[Any]
    evaluator: Engine
    data: BatchOrder

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates of the last update, one per parameter group."""
        ...

    @property
    def accumulated(self) -> int:
        """How many batches wait for the next update."""
        ...

    @property
    def total_iterations(self) -> int | None:
        """How many batches the run takes in all; None if that is not known."""
        ...

    @property
    def is_resuming(self) -> bool:
        """Whether a checkpoint was loaded from which the run has not continued yet."""
        ...

    @property
    def is_stepping(self) -> bool:
        """Whether a training step is in progress, so that the state is between two updates."""
        ...

    @property
    def is_rewinding(self) -> bool:
        """Whether this run ends only to continue from an earlier checkpoint."""
        ...

    @property
    def rewinds(self) -> int:
        """How often the run has returned to an earlier checkpoint."""
        ...

    def skip_update(self, where: Tensor) -> None:
        """Skip the current update where the condition, shape (), bool, holds."""
        ...

    def rewind(self, first: int, last: int, reason: str) -> None:
        """Return to a checkpoint before iteration `first` and leave out the batches up to `last`."""
        ...

    def checkpoint_state(self) -> dict[str, Any]:
        """Everything that the next iteration depends on."""
        ...


def is_training_run(engine: object) -> TypeGuard[TrainingRun]:
    """Whether the engine trains a model, so that a handler may ask it what `TrainingRun` lists."""
    return isinstance(engine, TrainingRun)
