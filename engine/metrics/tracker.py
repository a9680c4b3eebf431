"""The history of every metric of a run, by name."""

from __future__ import annotations

import math
import numbers
from array import array
from collections.abc import Callable, Iterator, Mapping
from threading import RLock
from typing import TypeVar, overload

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.errors import ArgumentTypeError, MetricNotFoundError
from pulsetrain.engine.metrics.direction import Mode, required_mode
from pulsetrain.engine.metrics.reading import canonical
from pulsetrain.engine.named_values import NamedValues

__all__ = ["MetricTracker"]

T = TypeVar("T")

_FOLD = 1000  # concatenate after this many device tensors: a separate one takes 512 bytes, an element of a row 4
_PROVISIONAL = -1  # the index of a value that is not in the history yet


class MetricTracker(Mapping[str, list[float]]):
    """A mapping from metric names to the lists of their values, in order; it is thread-safe.

    Values on a device stay there until something is read; then all are copied to the host together, with one copy per
    device and dtype. `name in tracker` reads nothing. Names may be given in their underscore form (`val_loss`).

    A provisional value, such as the mean of an unfinished epoch, is read like any other until the next value of its
    name replaces it; `state_dict()` leaves it out.

    >>> tracker = MetricTracker()
    >>> tracker.update({"train/loss": 2.0})
    >>> tracker.update({"train/loss": torch.tensor(1.0), "val/loss": 3.0})
    >>> tracker["train/loss"], tracker.get_latest("val_loss"), tracker.get_best("train/loss")
    ([2.0, 1.0], 3.0, 1.0)
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self.reset()

    def reset(self) -> None:
        """Discards every name and value."""
        with self._lock:
            self._values: dict[str, array[float]] = {}
            self._provisional: dict[str, float | Tensor] = {}
            # by device and dtype: rows of values, and for each value its name and the index in that history
            self._waiting: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[tuple[str, int]]]] = {}

    def update(self, metrics: Mapping[str, float | Tensor], *, provisional: bool = False) -> None:
        """Appends a value to each name.

        Args:
            metrics: numbers, or tensors of one element on any device, which it does not wait for.
            provisional: the next update of these names replaces the values.

        Raises:
            TypeError: a value is not a number; nothing is appended.
            ValueError: a tensor has more than one value; nothing is appended.
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
        """Makes the provisional values permanent, for example when an epoch was abandoned."""
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
            MetricNotFoundError: the name is unknown (also a KeyError, as for any mapping); names those that exist.
        """
        return self._ask(name, self._row)

    @overload
    def get_latest(self, name: str) -> float: ...
    @overload
    def get_latest(self, name: None = None) -> dict[str, float]: ...
    def get_latest(self, name: str | None = None) -> float | dict[str, float]:
        """The last value of that name, or of all names.

        Raises:
            MetricNotFoundError: as in `get_history`.
        """
        return self._ask(name, self._last)

    def get_best(self, name: str, mode: Mode | None = None) -> float:
        """The smallest or the largest value of a name; NaN only if all values are NaN.

        Args:
            name: the metric's.
            mode: which of the two, "min" or "max"; by default what its name says (`infer_mode`).

        Raises:
            ConfigurationError: the mode is unknown, or does not follow from the name.
            MetricNotFoundError: as in `get_history`.
        """
        place = "MetricTracker.get_best"
        found = self.get_history(name)
        mode = required_mode(place, name) if mode is None else mode
        check_choice(place, "mode", mode, ("min", "max"))
        values = [value for value in found if not math.isnan(value)]
        if not values:
            return math.nan
        return min(values) if mode == "min" else max(values)

    def state_dict(self) -> dict[str, list[float]]:
        """The values of each metric, without provisional ones."""
        with self._lock:
            self._read()
            return {name: row.tolist() for name, row in self._values.items() if row}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Replaces all values by the saved ones."""
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

    def _ask(self, name: str | None, ask: Callable[[str], T]) -> T | dict[str, T]:
        """The answer for that name, or for all names, once everything is on the host."""
        with self._lock:
            full = None if name is None else self._full(name)
            self._read()
            return NamedValues((each, ask(each)) for each in self._values) if full is None else ask(full)

    def _full(self, name: str) -> str:
        return canonical(name, self._values)

    def _row(self, name: str) -> list[float]:
        row = self._values[name].tolist()
        return [*row, float(self._provisional[name])] if name in self._provisional else row

    def _last(self, name: str) -> float:
        return float(self._provisional[name]) if name in self._provisional else self._values[name][-1]

    def _append(self, name: str, value: float | Tensor) -> None:
        row = self._values[name]
        if isinstance(value, Tensor):
            tensors, slots = self._waiting.setdefault((value.device, value.dtype), ([], []))
            tensors.append(value)
            slots.append((name, len(row)))
            if len(tensors) == _FOLD:
                tensors[:] = [torch.cat(tensors)]
            value = math.nan  # until it is read
        row.append(value)

    def _read(self) -> None:
        """Copies the values that are still on a device to the host; if interrupted, it can be called again."""
        waiting = {kind: (list(tensors), list(slots)) for kind, (tensors, slots) in self._waiting.items()}
        for name, value in self._provisional.items():
            if isinstance(value, Tensor):
                tensors, slots = waiting.setdefault((value.device, value.dtype), ([], []))
                tensors.append(value)
                slots.append((name, _PROVISIONAL))
        for tensors, slots in waiting.values():
            for (name, index), number in zip(slots, torch.cat(tensors).tolist(), strict=True):
                if index == _PROVISIONAL:
                    self._provisional[name] = number
                else:
                    self._values[name][index] = number
        self._waiting.clear()


def _number(name: str, value: object) -> float | Tensor:
    """The value as a float or as a copied tensor of shape (1,), since the caller may change the original."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"MetricTracker.update({name!r} of shape {tuple(value.shape)}): needs one number; pass its mean()"
            )
        return value.detach().reshape(1).clone()
    if not isinstance(value, numbers.Real):
        raise ArgumentTypeError("needs a number or a tensor of one element", "MetricTracker.update", **{name: value})
    return float(value)
