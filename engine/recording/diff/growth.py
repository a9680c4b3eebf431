"""How far two runs drift apart behind the event where they part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pulsetrain.engine.recording.log.non_finite import NON_FINITE
from pulsetrain.engine.recording.log.records import LoggedEvent

__all__ = ["Growth", "measure_growth"]

_SERIES = 256  # how many are followed; of a run that invents names, the first
_WAITING = 4096  # events of one side whose counterpart is still sought on the other


@dataclass(frozen=True)
class Growth:
    """How far a value drifts apart."""

    name: str  # engine and field, such as "trainer output.loss"
    largest: dict[tuple[int, int], float]  # absolute difference, by (first, last) iteration behind the divergence


def measure_growth(a: Iterable[LoggedEvent], b: Iterable[LoggedEvent], engine: str) -> tuple[Growth, ...]:
    """The values that differ, by decades of this engine's iterations; memory does not grow with the logs.

    An event's counterpart is that of the same engine, type, epoch and iteration, also where one side has more events
    in between. Against a finite number, "NaN" and "Infinity" are infinitely far.

    Args:
        a: the deterministic events of one side, from the divergence on.
        b: those of the other.
        engine: whose iterations are counted.
    """
    largest: dict[str, dict[int, float]] = {}
    start: int | None = None
    decade = 0
    for event, other in _pairs(a, b):
        if event.engine == engine:
            start = event.iteration if start is None else start
            behind = max(event.iteration - start, 0)
            decade = len(str(behind)) if behind else 0
        for field in ("output", "metrics", "lr", "payload"):
            x, y = getattr(event, field), getattr(other, field)
            if x is None or y is None or x == y:
                continue
            for name, difference in _differences(f"{event.engine} {field}", x, y):
                if difference and (name in largest or len(largest) < _SERIES):
                    series = largest.setdefault(name, {})
                    series[decade] = max(series.get(decade, 0.0), difference)
    return tuple(
        Growth(name, {_bounds(decade): series[decade] for decade in sorted(series)})
        for name, series in sorted(largest.items())
    )


def _bounds(decade: int) -> tuple[int, int]:
    return (10 ** (decade - 1), 10**decade - 1) if decade else (0, 0)


def _pairs(a: Iterable[LoggedEvent], b: Iterable[LoggedEvent]) -> Iterator[tuple[LoggedEvent, LoggedEvent]]:
    """Events of both sides that belong together."""
    waiting: tuple[dict[Any, LoggedEvent], dict[Any, LoggedEvent]] = {}, {}
    for pair in zip_longest(a, b):
        keys = [event and (event.engine, event.event, event.epoch, event.iteration) for event in pair]
        if keys[0] == keys[1]:
            yield pair
            continue
        for side, (key, event) in enumerate(zip(keys, pair, strict=True)):
            if event is None:
                continue
            other = waiting[1 - side].pop(key, None)
            if other is not None:
                yield (event, other) if side == 0 else (other, event)
                continue
            waiting[side].pop(key, None)
            waiting[side][key] = event
            if len(waiting[side]) > _WAITING:
                del waiting[side][next(iter(waiting[side]))]


def _differences(name: str, x: Any, y: Any) -> Iterator[tuple[str, float]]:
    """The numbers in two plain values, and how far apart they are."""
    if isinstance(x, dict) and isinstance(y, dict):
        for key in x.keys() & y.keys():
            yield from _differences(f"{name}.{key}", x[key], y[key])
    elif isinstance(x, list) and isinstance(y, list):
        for index, (item, other) in enumerate(zip(x, y, strict=False)):
            yield from _differences(f"{name}.{index}", item, other)
    elif (distance := _distance(x, y)) is not None:
        yield name, distance


def _distance(x: Any, y: Any) -> float | None:
    numbers = [NON_FINITE.get(value, value) if isinstance(value, str) else value for value in (x, y)]
    if x == y or any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        return None
    if all(isinstance(number, int) for number in numbers):  # a row's number or a fingerprint: how far says nothing
        return None
    try:
        distance = abs(float(numbers[0]) - float(numbers[1]))
    except OverflowError:  # a whole number beyond any float
        return math.inf
    return math.inf if math.isnan(distance) else distance
