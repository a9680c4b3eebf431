"""Cadences of handlers: the check of an `every` argument, and the events at which a step's output is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from pulsetrain.engine import Engine, Events, Every, is_training_run
from pulsetrain.engine.argument_checks import check_type
from pulsetrain.engine.distributed.pulse import SharedFlag
from pulsetrain.engine.events.filters import AfterSeconds
from pulsetrain.engine.events.names import EventsList

__all__ = ["SharedClock", "check_every", "reading_events", "shared_events"]

_Due: TypeAlias = Callable[[Any, int], bool]


def check_every(place: str, every: object, example: str = "Every(iterations=50)", *, or_none: bool = False) -> None:
    """Reject anything but an `Every`, or None where that is allowed.

    Raises:
        TypeError: not an Every.
    """
    check_type(place, "every", every, Every | None if or_none else Every, f"an Every, such as {example}")


def reading_events(every: Every, clock: Callable[[], float] = time.monotonic) -> EventsList:
    """The events at which `state.output` is read. A cadence of updates is moved to the end of the iteration.

    An update happens inside the step, before the step has an output.
    """
    if every.updates is None:
        return every.events(clock)
    joined = EventsList()
    if every != Every(updates=every.updates):
        joined = Every(iterations=every.iterations, epochs=every.epochs, seconds=every.seconds).events(clock)
    interval = every.updates
    seen: WeakKeyDictionary[Engine, tuple[int, int]] = WeakKeyDictionary()  # of each engine: iteration, updates

    def has_updated(engine: Engine, iteration: int) -> bool:
        update = engine.state.update
        last, before = seen.get(engine, (iteration, 0))
        # a trainer jumps when it loads a checkpoint; the log of a replay may leave iterations out
        follows = iteration == last + 1 if is_training_run(engine) else iteration > last
        if not follows:
            before = max(update - (not is_training_run(engine) or engine.accumulated == 0), 0)
        seen[engine] = iteration, update
        return bool(update // interval > before // interval)

    return joined | Events.ITERATION_COMPLETED(event_filter=has_updated)


def shared_events(every: Every, flag: SharedFlag | None, *, is_main: bool = True) -> EventsList:
    """The events of `reading_events`; of several processes, the clock of the main one decides for all.

    Args:
        every: the cadence.
        flag: one that all processes share, which the clock raises; None for a process alone.
        is_main: whether this is the main process.
    """
    if flag is None or every.seconds is None:
        return reading_events(every)
    due = AfterSeconds(every.seconds, time.monotonic) if is_main else None
    timed = EventsList() | Events.ITERATION_COMPLETED(event_filter=SharedClock(due, flag))
    return timed if every == Every(seconds=every.seconds) else timed | reading_events(replace(every, seconds=None))


class SharedClock:
    """A filter that is due by a clock; with a flag, at the next iteration at which that is up in all processes.

    What the handler fires then is observed, since its moment depends on the clock: see `Engine.fire`.

    Args:
        due: reads the clock; None in a process whose clock does not count.
        flag: which all processes share; None for a process alone.
    """

    is_timed = True

    def __init__(self, due: _Due | None, flag: SharedFlag | None) -> None:
        self._due, self._flag = due, flag

    def __call__(self, engine: object, iteration: int) -> bool:
        is_due = self._due is not None and self._due(engine, iteration)
        if self._flag is None:
            return is_due
        if self._flag.take():
            return True
        if is_due:
            self._flag.raise_it()
        return False
