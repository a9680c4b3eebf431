"""What guards share: which batches an anomaly came from, how it is told, and what is done about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from pulsetrain.engine.data import rng
from pulsetrain.engine.errors import ConfigurationError, PulsetrainError, unknown_name
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.payloads import AnomalyDetected
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.attachment.monitoring import check_whole

__all__ = ["Batch", "Policy", "announce", "batches_between", "odd_rows"]

PolicyName = Literal["warn", "skip", "stop", "rewind"]


class Batch(NamedTuple):
    """A batch that was trained: its iteration, and its place in the data where the engine knows it."""

    iteration: int
    place: tuple[int, int] | None

    def state(self) -> list[Any]:
        """In plain containers, for `of_state`."""
        return [self.iteration, None if self.place is None else list(self.place)]

    @classmethod
    def of_state(cls, state: Sequence[Any]) -> Batch:
        """What `state` gave."""
        iteration, place = state
        return cls(iteration, None if place is None else (place[0], place[1]))

    def rows(self, engine: Any) -> tuple[int, ...]:
        """The indices of its samples in the dataset; none where they are not known."""
        if self.place is None:
            return ()
        rows = engine.position.rows_at(self.place)
        return tuple(rows) if all(isinstance(row, int) for row in rows) else ()


def batches_between(engine: Any, first: int, last: int) -> list[Batch]:
    """The batches of those iterations, both ends included; to be asked before another pass over the data begins."""
    position = getattr(engine, "position", None)
    begun = getattr(position, "pass_start", 0)
    return [
        Batch(each, position.locate(each) if position is not None and each > begun else None)
        for each in range(first, last + 1)
    ]


def odd_rows(engine: Any, rows: Sequence[int]) -> list[int]:
    """Those of the rows that hold a number that is not finite, as the dataset gives them now."""
    dataset = getattr(getattr(engine, "train_loader", None), "dataset", None)
    if dataset is None:
        return []
    found = []
    with rng.kept():  # a dataset may draw
        for row in rows:
            try:
                sample = dataset[row]
            except Exception:  # whatever the dataset raises, the anomaly is told
                continue
            if _is_odd(sample):
                found.append(row)
    return found


def _is_odd(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(value.is_floating_point() and not value.isfinite().all())
    if isinstance(value, np.ndarray):
        return bool(np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all())
    if isinstance(value, Mapping):
        return any(map(_is_odd, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(_is_odd, value))
    return isinstance(value, (float, np.floating)) and not math.isfinite(value)


def announce(engine: Engine, kind: str, value: float, batches: Sequence[Batch], message: str, **facts: Any) -> None:
    """Say it once by the log and once by ANOMALY_DETECTED, with the rows of its batches."""
    rows = tuple(row for batch in batches for row in batch.rows(engine))
    odd = odd_rows(engine, rows)
    where = {"iteration": batches[-1].iteration, "epoch": engine.state.epoch, "value": value, **facts}
    if rows:
        where["rows"] = list(rows)
    if odd:
        where["rows_not_finite"] = odd
    get_logger("handlers").warning(message, engine=engine.name, **where)
    anomaly = AnomalyDetected(kind=kind, value=value, batch_indices=rows, at_iteration=batches[-1].iteration)
    engine.fire(Events.ANOMALY_DETECTED, anomaly)


class Policy:
    """What a guard does once it has told: go on, stop the run, or go back to a checkpoint.

    Args:
        place: the guard's class name, for messages.
        name: "stop", "rewind", or what its guard calls going on.
        goes_on: that name.
        max_rewinds: of one run; the next one stops it.

    Raises:
        ConfigurationError: another name, or a number below 1.
    """

    def __init__(self, place: str, name: str, goes_on: str, max_rewinds: int) -> None:
        if name not in (goes_on, "stop", "rewind"):
            raise unknown_name(place, "policy", name, (goes_on, "stop", "rewind"))
        check_whole(place, "max_rewinds", max_rewinds)
        self.name = name
        self.max_rewinds = max_rewinds
        self._place = place

    def check(self, engine: Any) -> None:
        """Refuse an engine that cannot go back.

        Raises:
            ConfigurationError: the policy is to go back, and it cannot.
        """
        if self.name == "rewind" and not callable(getattr(engine, "rewind", None)):
            raise ConfigurationError(
                f"{self._place}(policy='rewind'): {engine.name!r} cannot go back to a checkpoint, which a Trainer can; "
                "choose 'stop'"
            )

    def apply(self, engine: Any, first: int, last: int, reason: str) -> None:
        """Do it, for what went wrong between these iterations."""
        reason = f"{self._place}: {reason}"
        if self.name == "stop":
            engine.terminate(reason=reason)
        elif self.name == "rewind" and engine.rewinds >= self.max_rewinds:
            engine.terminate(reason=f"{reason}; it has gone back {engine.rewinds} times already")
        elif self.name == "rewind":
            try:
                engine.rewind(first, last, reason)
            except PulsetrainError as error:
                engine.terminate(reason=f"{reason}; {error}")
