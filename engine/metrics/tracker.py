"""The values of every metric of a run, by name and in order."""

from __future__ import annotations

import math
import numbers
from array import array
from collections.abc import Iterator, Mapping
from threading import RLock
from typing import Any, Literal, overload

import torch
from torch import Tensor

from pulsetrain.engine.errors import MetricNotFoundError, unknown_name
from pulsetrain.engine.metrics.reading import canonical

__all__ = ["MetricTracker"]

_FOLD = 1000  # device tensors that are kept apart at most: each takes 512 bytes of an accelerator, a float in a row 4
_PROVISIONAL = -1  # the place of a value that is in no history yet


class MetricTracker(Mapping[str, list[float]]):
    """Metric name -> its values, in the order in which they came; any thread may add and read.

    Values that are on a device stay there until something is read: then all are brought to the host together, one copy
    for each device and dtype. Asking whether a name is known reads nothing. As a mapping it gives lists of floats;
    names may be asked for in their underscore form (`val_loss`).

    A provisional value, such as the mean of an unfinished epoch, is read like any other until the next value of its
    name takes its place; `state_dict()` leaves it out.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self.reset()

    def reset(self) -> None:
        """Forget every name and value."""
        with self._lock:
            self._values: dict[str, array[float]] = {}
            self._provisional: dict[str, float | Tensor] = {}
            # by device and dtype: rows of values, and whose each is: a name, and the place in its history
            self._waiting: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[tuple[str, int]]]] = {}

    def update(self, metrics: Mapping[str, float | Tensor], *, provisional: bool = False) -> None:
        """Append a value to each name.

        Args:
            metrics: numbers, or tensors of one element on any device, which are not waited for.
            provisional: the next update of these names takes the values back.

        Raises:
            TypeError: a value is no number.
            ValueError: a tensor of more than one value. Nothing of the mapping is kept then.
        """
        values = {name: _number(name, value) for name, value in metrics.items()}
        with self._lock:
            for name, value in values.items():
                self._provisional.pop(name, None)
                self._values.setdefault(name, array("d"))
                if provisional:
                    self._provisional[name] = value
                else:
                    self._append(name, value)

    def keep_provisional(self) -> None:
        """Make the provisional values lasting: what they stand for, such as an epoch, was given up and stays so."""
        with self._lock:
            for name, value in self._provisional.items():
                self._append(name, value)
            self._provisional.clear()

    @overload
    def get_history(self, name: str) -> list[float]: ...
    @overload
    def get_history(self, name: None = None) -> dict[str, list[float]]: ...
    def get_history(self, name: str | None = None) -> list[float] | dict[str, list[float]]:
        """All values of that name, or of all names.

        Raises:
            MetricNotFoundError: there is no such name (also a KeyError, as for any mapping); it names those that exist.
        """
        with self._lock:
            if name is None:
                self._read()
                return {each: self._row(each) for each in self._values}
            name = self._full(name)
            self._read()
            return self._row(name)

    @overload
    def get_latest(self, name: str) -> float: ...
    @overload
    def get_latest(self, name: None = None) -> dict[str, float]: ...
    def get_latest(self, name: str | None = None) -> float | dict[str, float]:
        """The last value of that name, or of all names.

        Raises:
            MetricNotFoundError: as in `get_history`.
        """
        with self._lock:
            if name is None:
                self._read()
                return {each: self._last(each) for each in self._values}
            name = self._full(name)
            self._read()
            return self._last(name)

    def get_best(self, name: str, mode: Literal["min", "max"] = "min") -> float:
        """The smallest or the largest value of that name; NaN only where all are.

        Raises:
            ConfigurationError: another mode.
            MetricNotFoundError: as in `get_history`.
        """
        if mode not in ("min", "max"):
            raise unknown_name("MetricTracker.get_best", "mode", mode, ("min", "max"))
        values = [value for value in self.get_history(name) if not math.isnan(value)]
        if not values:
            return math.nan
        return min(values) if mode == "min" else max(values)

    def state_dict(self) -> dict[str, list[float]]:
        with self._lock:
            self._read()
            return {name: row.tolist() for name, row in self._values.items() if row}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        values = {name: array("d", row) for name, row in state.items() if row}
        with self._lock:
            self.reset()
            self._values = values

    def __getitem__(self, name: str) -> list[float]:
        return self.get_history(name)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        with self._lock:
            try:
                self._full(name)
            except MetricNotFoundError:
                return False
        return True

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        latest = ", ".join(f"{name}={value:.6g}" for name, value in self.get_latest().items())
        return f"MetricTracker({latest})"

    def _full(self, name: str) -> str:
        try:
            return canonical(name, self._values, place="MetricTracker")
        except MetricNotFoundError as error:
            raise _UnknownMetricError(str(error)) from None

    def _row(self, name: str) -> list[float]:
        row = self._values[name].tolist()
        return [*row, float(self._provisional[name])] if name in self._provisional else row

    def _last(self, name: str) -> float:
        return float(self._provisional[name]) if name in self._provisional else self._values[name][-1]

    def _append(self, name: str, value: float | Tensor) -> None:
        row = self._values[name]
        if isinstance(value, Tensor):
            tensors, places = self._waiting.setdefault((value.device, value.dtype), ([], []))
            tensors.append(value)
            places.append((name, len(row)))
            if len(tensors) == _FOLD:
                tensors[:] = [torch.cat(tensors)]
            value = math.nan  # until it is read
        row.append(value)

    def _read(self) -> None:
        """Bring what is still on a device to the host; interrupted while it waits, it can be called again."""
        waiting = {kind: (list(tensors), list(places)) for kind, (tensors, places) in self._waiting.items()}
        for name, value in self._provisional.items():
            if isinstance(value, Tensor):
                tensors, places = waiting.setdefault((value.device, value.dtype), ([], []))
                tensors.append(value)
                places.append((name, _PROVISIONAL))
        for tensors, places in waiting.values():
            for (name, place), number in zip(places, torch.cat(tensors).tolist(), strict=True):
                if place == _PROVISIONAL:
                    self._provisional[name] = number
                else:
                    self._values[name][place] = number
        self._waiting.clear()


def _number(name: str, value: Any) -> float | Tensor:
    """The value as a float, or as a tensor of shape (1,) of its own: the caller may change his later."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"MetricTracker.update({name!r} of shape {tuple(value.shape)}): needs one number; pass its mean()"
            )
        return value.detach().reshape(1).clone()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"MetricTracker.update({name!r}={value!r}): needs a number or a tensor of one element")
    return float(value)


class _UnknownMetricError(MetricNotFoundError, KeyError):
    """A KeyError as well, so that `get` of a mapping finds its default."""

    __str__ = Exception.__str__  # KeyError's shows quotes around the message
