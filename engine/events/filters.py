"""Filters: which values of an event's counter are due.

A filter is any callable `(engine, value) -> bool`. An `EventFilter` can also compute when it is next due, so that the
firings in between cost nothing.
"""

from __future__ import annotations

import inspect
import numbers
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError

__all__ = ["NEVER", "AfterSeconds", "EventFilter", "Filter", "build_filter"]

NEVER = 1 << 62  # a counter value that no run reaches

Filter: TypeAlias = Callable[..., bool]


@dataclass(frozen=True)
class EventFilter:
    """Which values of an event's counter are due: `every`, `before` and `after` combine, `once` excludes the others.

    The semantics are pytorch-ignite's: bounds are exclusive, and with a bound `every` counts from `after`.

    >>> window = EventFilter(every=3, after=4, before=12)
    >>> [value for value in range(20) if window(None, value)]
    [5, 8, 11]
    >>> window.next_due(5)
    8
    """

    every: int = 1
    once: tuple[int, ...] = ()
    before: int = NEVER
    after: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "once", tuple(self.once))  # a list has no hash

    def __call__(self, engine: object, value: int) -> bool:
        """Whether the counter value is due."""
        if self.once:
            return value in self.once
        if self.after is None:
            return value % self.every == 0
        return self.after < value < self.before and (value - self.after - 1) % self.every == 0

    def __str__(self) -> str:
        if self.once:
            return f"once={self.once[0] if len(self.once) == 1 else list(self.once)}"
        parts = [f"every={self.every}"] if self.every != 1 else []
        parts += [f"before={self.before}"] if self.before != NEVER else []
        parts += [f"after={self.after}"] if self.after else []
        return ", ".join(parts) or "after=0"

    def next_due(self, value: int) -> int:
        """The smallest due value above `value`, or NEVER."""
        if self.once:
            index = bisect_right(self.once, value)
            return self.once[index] if index < len(self.once) else NEVER
        if self.after is None:
            return (value // self.every + 1) * self.every
        start = max(value, self.after) + 1
        due = start + (self.after + 1 - start) % self.every
        return due if due < self.before else NEVER


class AfterSeconds:
    """A filter that is due when `seconds` have passed since it was last due, or since it was first called.

    The handler runs at a moment that depends on the clock, so the events that it fires are observed: see `Engine.fire`.

    >>> times = iter([0.0, 4.0, 10.0, 12.0])
    >>> due = AfterSeconds(10.0, clock=lambda: next(times))
    >>> [due(None, iteration) for iteration in (1, 2, 3, 4)]
    [False, False, True, False]
    """

    is_timed = True

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self._clock = clock
        self._last: float | None = None

    def __call__(self, engine: object, value: int) -> bool:
        now = self._clock()
        if self._last is None:
            self._last = now
        if now - self._last < self.seconds:
            return False
        self._last = now
        return True


def build_filter(
    event: object,
    event_filter: Filter | None,
    every: int | None,
    once: int | Sequence[int] | None,
    before: int | None,
    after: int | None,
) -> Filter | None:
    """The filter that an event was called with; None for `every=1`, which filters nothing.

    Raises:
        ValueError: no argument, arguments that do not combine, or a value out of range.
        TypeError: event_filter is not callable.
    """
    windowed = every is not None or before is not None or after is not None
    if (event_filter is not None) + (once is not None) + windowed != 1:
        raise ValueError(
            f"{event}(...): Only one of the input arguments should be specified, except before, after and every, "
            "which combine; pass event_filter, or once, or those"
        )
    if event_filter is not None:
        return _checked_function(event, event_filter)
    if once is not None:
        return EventFilter(once=_checked_once(event, once))
    for name, value, least in (("every", every, 1), ("before", before, 0), ("after", after, 0)):
        if value is not None and not (isinstance(value, numbers.Integral) and value >= least):
            rule = f"should be integer and greater {'than' if least else 'or equal to'} zero"
            raise ConfigurationError(f"Argument {name} {rule}", str(event), **{name: value})
    if before is None and after is None:
        assert every is not None
        return None if every == 1 else EventFilter(every=int(every))
    return EventFilter(every=every or 1, before=NEVER if before is None else before, after=after or 0)


def _checked_function(event: object, event_filter: Filter) -> Filter:
    if not callable(event_filter):
        raise ArgumentTypeError(
            "Argument event_filter should be a callable(engine, value)", str(event), event_filter=event_filter
        )
    try:
        inspect.signature(event_filter).bind(None, 0)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"does not fit, but will be called with (engine, value): {error}", str(event), event_filter=event_filter
        ) from None
    return event_filter


def _checked_once(event: object, once: int | Sequence[int]) -> tuple[int, ...]:
    values = (once,) if isinstance(once, int) else once
    if (
        isinstance(values, str)
        or not isinstance(values, Sequence)
        or not values
        or not all(isinstance(value, int) and value > 0 for value in values)
    ):
        raise ConfigurationError(
            f"Argument once should either be a positive integer or a list of positive integers, got {once}",
            str(event),
            once=once,
        )
    return tuple(sorted(set(values)))
