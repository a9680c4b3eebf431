"""How far two runs drift apart after the first event that differs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from pulsetrain.engine.recording.diff.fields import leaves
from pulsetrain.engine.recording.log.non_finite import parse_non_finite
from pulsetrain.engine.recording.log.records import Json, LoggedEvent

__all__ = ["Growth", "measure_growth"]

_SERIES = 256  # values to follow at most: a run that makes up names must not fill the memory
_WAITING = 4096  # events of one side to keep at most until their counterparts on the other side are found


@dataclass(frozen=True)
class Growth:
    """How far a value drifts apart."""

    name: str  # engine and field, such as "trainer output.loss"
    largest: dict[tuple[int, int], float]  # absolute difference, by (first, last) iteration after the divergence


def measure_growth(a: Iterable[LoggedEvent], b: Iterable[LoggedEvent], engine: str) -> tuple[Growth, ...]:
    """Measure the values that differ, by decades of this engine's iterations; memory does not grow with the logs.

    Two events are compared if they have the same engine, type, epoch and iteration; either side may have more events
    in between. "NaN" and "Infinity" are infinitely far from a finite number.

    Args:
        a: the deterministic events of one side, from the divergence on.
        b: those of the other side.
        engine: the engine whose iterations are counted.
    """
    largest: dict[str, dict[int, float]] = {}
    start: int | None = None
    decade = 0
    for event, other in _pairs(a, b):
        if event.engine == engine:
            start = event.iteration if start is None else start
            since = max(event.iteration - start, 0)
            decade = len(str(since)) if since else 0
        for field in ("output", "metrics", "lr", "payload"):
            x, y = getattr(event, field), getattr(other, field)
            if x is None or y is None or x == y:
                continue
            for name, mine, theirs in leaves(f"{event.engine} {field}", x, y):
                difference = _distance(mine, theirs)
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
    """Events of both sides that are to be compared."""
    waiting: tuple[dict[object, LoggedEvent], dict[object, LoggedEvent]] = {}, {}
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


def _distance(x: Json, y: Json) -> float | None:
    numbers = [parse_non_finite(value) for value in (x, y)]
    if x == y or any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        return None
    if all(isinstance(number, int) for number in numbers):  # rows or fingerprints, whose difference means nothing
        return None
    try:
        distance = abs(float(numbers[0]) - float(numbers[1]))
    except OverflowError:  # an integer larger than any float
        return math.inf
    return math.inf if math.isnan(distance) else distance
