"""What the guards share: the batches of an anomaly, its report, and what follows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from pulsetrain.engine.argument_checks import check_choice, check_whole_number
from pulsetrain.engine.data import rng
from pulsetrain.engine.errors import ConfigurationError, PulsetrainError
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Events, EventsList
from pulsetrain.engine.events.payloads import AnomalyDetected
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.training_run import BatchOrder, is_training_run
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.cadence import check_every, reading_events

__all__ = ["Guard", "TrainedBatch", "batch_order", "report_anomaly"]

BatchState = tuple[int, Sequence[int] | None]


class TrainedBatch(NamedTuple):
    """A batch that was trained on: its iteration, and its location in the data where the run knows it."""

    iteration: int
    location: tuple[int, int] | None

    def state(self) -> list[object]:
        """In plain containers, for `from_state`."""
        return [self.iteration, None if self.location is None else list(self.location)]

    @classmethod
    def from_state(cls, state: BatchState) -> TrainedBatch:
        """The batch that `state()` was called on."""
        iteration, location = state
        return cls(iteration, None if location is None else (location[0], location[1]))

    @classmethod
    def of_iteration(cls, iteration: int, data: BatchOrder | None) -> TrainedBatch:
        """The batch of an iteration; ask before the next pass over the data begins.

        Args:
            data: the order of the run's batches; without it the location is not known.
        """
        known = data is not None and iteration > data.pass_start
        return cls(iteration, data.locate(iteration) if data is not None and known else None)

    def rows(self, data: BatchOrder | None) -> tuple[int, ...]:
        """The indices of its samples in the dataset; empty where they are not known."""
        if self.location is None or data is None:
            return ()
        rows = data.rows_at(self.location)
        return tuple(rows) if all(isinstance(row, int) for row in rows) else ()


def batch_order(engine: object) -> BatchOrder | None:
    """The order of the run's batches; None on an engine that is not a training run."""
    return engine.data if is_training_run(engine) else None


def _nonfinite_rows(engine: object, rows: Sequence[int]) -> list[int]:
    """Those of the rows whose sample, read from the dataset again, holds a number that is not finite."""
    dataset = getattr(engine.train_loader, "dataset", None) if is_training_run(engine) else None
    if dataset is None:
        return []
    found = []
    with rng.preserve_rng():  # a dataset may draw random numbers
        for row in rows:
            try:
                sample = dataset[row]
            except Exception:  # the dataset's own code: the anomaly is reported whatever it raises
                continue
            if _has_nonfinite(sample):
                found.append(row)
    return found


def _has_nonfinite(value: object) -> bool:
    if isinstance(value, Tensor):
        return bool(value.is_floating_point() and not value.isfinite().all())
    if isinstance(value, np.ndarray):
        return bool(np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all())
    if isinstance(value, Mapping):
        return any(map(_has_nonfinite, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(_has_nonfinite, value))
    return isinstance(value, (float, np.floating)) and not math.isfinite(value)


def report_anomaly(
    engine: Engine, kind: str, value: float, batches: Sequence[TrainedBatch], message: str, **facts: object
) -> None:
    """Log a warning and fire ANOMALY_DETECTED, both with the dataset rows of the batches."""
    data = batch_order(engine)
    rows = tuple(row for batch in batches for row in batch.rows(data))
    nonfinite = _nonfinite_rows(engine, rows)
    iteration = batches[-1].iteration
    where: dict[str, object] = {"iteration": iteration, "epoch": engine.state.epoch, "value": value, **facts}
    if rows:
        where["rows"] = list(rows)
    if nonfinite:
        where["rows_not_finite"] = nonfinite
    get_logger("handlers").warning(message, engine=engine.name, **where)
    anomaly = AnomalyDetected(kind=kind, value=value, batch_indices=rows, at_iteration=iteration)
    engine.fire(Events.ANOMALY_DETECTED, anomaly)


@runtime_checkable
class _Rewindable(Protocol):
    @property
    def rewinds(self) -> int: ...
    def rewind(self, first: int, last: int, reason: str) -> None: ...


class Guard(Handler):
    """Base class of guards. After its report, a guard continues, stops the run, or rewinds it to a checkpoint.

    Args:
        policy: "stop", "rewind", or the guard's name for continuing.
        continues: that name.
        every: when the host checks.
        max_rewinds: per run; the next one stops it.
        clock: seconds, for `Every(seconds=...)`.

    Raises:
        ConfigurationError: another policy, or a number below 1.
        TypeError: the cadence is not an Every.
    """

    def __init__(self, policy: str, continues: str, every: Every, max_rewinds: int, clock: Callable[[], float]) -> None:
        self._place = type(self).__name__
        check_choice(self._place, "policy", policy, (continues, "stop", "rewind"))
        check_whole_number(self._place, "max_rewinds", max_rewinds)
        check_every(self._place, every)
        self.policy = policy
        self.every = every
        self.max_rewinds = max_rewinds
        self._clock = clock
        self._checks_alike = every.seconds is None  # of several processes, each in the same iteration

    def _check_engine(self, engine: Engine) -> None:
        """Reject an engine that cannot rewind, where the policy is to rewind.

        Raises:
            ConfigurationError: it cannot.
        """
        if self.policy == "rewind" and not isinstance(engine, _Rewindable):
            rule = f"{engine.name!r} cannot return to a checkpoint, which a Trainer can; choose 'stop'"
            raise ConfigurationError(rule, self._place, policy=self.policy)

    def _check_events(self) -> EventsList:
        """When the guard reads the device: at the cadence, and at the end of each epoch and of the run."""
        return reading_events(self.every, self._clock) | Events.EPOCH_COMPLETED | Events.COMPLETED

    def _act(self, engine: Engine, first: int, last: int, reason: str) -> None:
        """Act on an anomaly of the iterations `first` to `last`."""
        reason = f"{self._place}: {reason}"
        if self.policy == "stop":
            engine.terminate(reason=reason, alike=self._checks_alike)
        elif self.policy == "rewind" and isinstance(engine, _Rewindable):
            if engine.rewinds >= self.max_rewinds:
                engine.terminate(reason=f"{reason}; it has been rewound {engine.rewinds} times already")
                return
            try:
                engine.rewind(first, last, reason)
            except PulsetrainError as error:
                # not in the reason, which is recorded: a rerun that `verify` compares has other checkpoints
                get_logger("handlers").warning("the run cannot return to a checkpoint, and ends", reason=str(error))
                engine.terminate(reason=f"{reason}; it cannot return to a checkpoint")
