"""What a training run says of itself, answered by the parts that own it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pulsetrain.engine import Engine
from pulsetrain.engine.metrics import MetricTracker
from pulsetrain.state.data_cursor import DataCursor
from pulsetrain.state.resume import Resumer
from pulsetrain.training.agreement import Agreement
from pulsetrain.training.reporter import MetricsReporter
from pulsetrain.training.run_driver import RunDriver
from pulsetrain.training.run_length import RunLength
from pulsetrain.training.stepper import Stepper
from pulsetrain.training.validation import Evaluation, Validator

__all__ = ["RunView"]


class RunView(Engine):
    """An engine that trains, seen by its handlers and its user; the Trainer makes the parts."""

    agreement: Agreement
    data: DataCursor
    driver: RunDriver
    evaluation: Evaluation
    length: RunLength
    reporter: MetricsReporter
    resumer: Resumer
    stepper: Stepper
    validator: Validator

    @property
    def is_resuming(self) -> bool:
        """Whether a checkpoint was loaded from which the run has not continued yet."""
        return self.resumer.is_resuming

    @property
    def is_stepping(self) -> bool:
        """Whether a training step is in progress, so that the state is between two updates."""
        return self.stepper.is_stepping

    def as_step(self) -> AbstractContextManager[None]:
        """Refuse checkpoints inside the block, as during a training step: the state is between two updates."""
        return self.stepper.as_step()

    @property
    def is_rewinding(self) -> bool:
        """Whether this run ends only to continue from an earlier checkpoint."""
        return self.driver.is_rewinding

    @property
    def rewinds(self) -> int:
        """How often the run has returned to an earlier checkpoint."""
        return self.data.rewinds

    @property
    def accumulated(self) -> int:
        """How many batches wait for the next update."""
        return self.stepper.accumulated

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates of the last update, one per parameter group."""
        return self.stepper.learning_rates

    @property
    def seed(self) -> int:
        """The run's seed: the configuration's, torch's when the run started, or that of the loaded checkpoint."""
        return self.data.seed

    @property
    def total_iterations(self) -> int | None:
        """How many batches the run takes in all; None if that is not known."""
        return self.length.total_iterations

    @property
    def processes(self) -> Sequence[Mapping[str, object]]:
        """Host, pid and environment of each process that trains, by rank, in the main one; empty if there is one."""
        return self.agreement.processes

    @property
    def attempt(self) -> str:
        """An id of this start of the processes, the same in all of them."""
        return self.agreement.attempt

    @property
    def history(self) -> MetricTracker:
        """The values of every metric of the run."""
        return self.reporter.history

    @property
    def val_loaders(self) -> Mapping[str, Iterable[Any]]:
        """The validation sets by name."""
        return self.validator.loaders

    @val_loaders.setter
    def val_loaders(self, loaders: Mapping[str, Iterable[Any]]) -> None:
        self.validator.loaders = loaders
        self.reporter.validation_sets = loaders.keys()

    @property
    def val_metrics(self) -> Mapping[str, object]:
        """The metric objects by their full names, such as "val/accuracy"."""
        metrics = self.evaluation.metrics
        return {f"{name}/{metric}": each for name in self.val_loaders for metric, each in metrics.items()}

    def describe_bound(self) -> str:
        return self.length.describe_bound(self.state)

    @property
    def is_done(self) -> bool:
        """Whether the run has reached its bound."""
        return self.driver.is_done
