"""What a handler may ask of the run that it is attached to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeIs

    from pulsetrain.engine.distributed.pulse import SharedFlag
    from pulsetrain.engine.events.engine import Engine
    from pulsetrain.engine.optimizers import NamedOptimizers
    from pulsetrain.engine.step.backend import Backend
    from pulsetrain.engine.step.protocols import AlternatingStrategy, TrainingStrategy

__all__ = [
    "BatchOrder",
    "TrainingRun",
    "is_training_run",
    "model_of",
    "optimizer_of",
    "total_iterations_of",
    "validation_contexts",
]


class BatchOrder(Protocol):
    """Which rows of the data set each batch holds; a trainer's `data`."""

    pass_start: int
    """The iteration before the first batch of the current pass over the data."""
    trained: int
    """The last iteration whose step was made."""

    left_out_since: Sequence[tuple[int, int]]
    """The iterations (first, last) whose batches have been left out since the run returned to a checkpoint."""

    def locate(self, iteration: int) -> tuple[int, int] | None:
        """Where in the data order a batch of the current pass is, for `rows_at`; None if the loader decides itself."""

    def rows_at(self, location: tuple[int, int]) -> list[Any]:
        """The data set's indices of the batch at that location."""

    def rows(self, iteration: int) -> list[Any] | None:
        """The data set's indices of a batch of the current pass; None if the loader decides itself."""


class TrainingRun(Protocol):
    """A run that trains a model. `pulsetrain.Trainer` implements it; a plain Engine does not."""

    model: nn.Module
    optimizer: Optimizer
    optimizers: NamedOptimizers | None
    strategy: TrainingStrategy | AlternatingStrategy
    backend: Backend
    config: Any
    train_loader: Iterable[Any]
    val_loaders: Mapping[str, Iterable[Any]]
    handlers: Sequence[Any]
    evaluator: Engine
    data: BatchOrder

    @property
    def seed(self) -> int:
        """The run's seed."""

    @property
    def val_metrics(self) -> Mapping[str, object]:
        """The metric objects by their full names, such as "val/accuracy"."""

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates of the last update, one per parameter group."""

    @property
    def accumulated(self) -> int:
        """How many batches wait for the next update."""

    @property
    def processes(self) -> Sequence[Mapping[str, object]]:
        """Host, pid and environment of each process that trains, by rank; empty if there is one."""

    @property
    def attempt(self) -> str:
        """An id of this start of the processes, the same in all of them."""

    @property
    def total_iterations(self) -> int | None:
        """How many batches the run takes in all; None if that is not known."""

    @property
    def is_resuming(self) -> bool:
        """Whether a checkpoint was loaded from which the run has not continued yet."""

    @property
    def is_stepping(self) -> bool:
        """Whether a training step is in progress, so that the state is between two updates."""

    @property
    def is_rewinding(self) -> bool:
        """Whether this run ends only to continue from an earlier checkpoint."""

    @property
    def rewinds(self) -> int:
        """How often the run has returned to an earlier checkpoint."""

    def skip_update(self, where: Tensor) -> None:
        """Skip the current update where the condition, shape (), bool, holds."""

    def rewind(self, first: int, last: int, reason: str) -> None:
        """Return to a checkpoint before iteration `first` and leave out the batches up to `last`."""

    def checkpoint_state(self) -> dict[str, Any]:
        """Everything that the next iteration depends on."""

    def sharing(self) -> AbstractContextManager[None]:
        """A block that all processes enter at the same event: the state inside holds what each of them alone knows."""

    def shared_flag(self, owner: object) -> SharedFlag:
        """The owner's flag, which any process may raise, and which all see from their next pulse on."""

    def files_to_sync(self) -> list[Path]:
        """Files that the run's handlers have written and that a checkpoint counts on."""


def is_training_run(engine: object) -> TypeIs[TrainingRun]:
    """Whether the engine trains a model, so that a handler may ask it what `TrainingRun` lists.

    >>> from pulsetrain import Engine, Trainer
    >>> engine = Engine(lambda engine, batch: None)
    >>> is_training_run(engine), is_training_run(Trainer.__new__(Trainer))
    (False, True)
    """
    # asked of the class: `isinstance` takes 80 us, and a replay raises if asked for what its log lacks
    return hasattr(type(engine), "is_rewinding")


def model_of(engine: object) -> nn.Module | None:
    """The torch model of a training run, or the one that was set as `engine.model`; None without one.

    Raises:
        RecordingError: the engine is replayed from a log, which holds no weights.
    """
    model = getattr(engine, "model", None)
    return model if isinstance(model, nn.Module) else None


def optimizer_of(engine: object) -> Optimizer | None:
    """The torch optimizer of a training run, or the one that was set as `engine.optimizer`; None without one."""
    optimizer = getattr(engine, "optimizer", None)
    return optimizer if isinstance(optimizer, Optimizer) else None


def total_iterations_of(engine: object) -> int | None:
    """How many batches a training run, or the recorded one of a replay, takes in all; None if that is not known."""
    total: int | None = getattr(engine, "total_iterations", None)
    return total


def validation_contexts(engine: object) -> list[Callable[[], AbstractContextManager[object]]] | None:
    """What the engine's evaluator enters for each validation, such as `EMA.applied`; None without an evaluator."""
    found: list[Callable[[], AbstractContextManager[object]]] | None
    found = getattr(getattr(engine, "evaluator", None), "contexts", None)
    return found
