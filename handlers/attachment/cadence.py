"""Cadences of handlers: the check of an `every` argument, and the events at which a step's output is read."""

from __future__ import annotations

import time
from collections.abc import Callable

from pulsetrain.engine import Engine, Events, Every, is_training_run
from pulsetrain.engine.argument_checks import check_type
from pulsetrain.engine.events.names import EventsList

__all__ = ["check_every", "reading_events"]


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
    seen: int | None = None

    def has_updated(engine: Engine, value: int) -> bool:
        nonlocal seen
        update = engine.state.update
        if seen is None:  # the first call of a run, which may have resumed at update 1,000
            seen = max(update - (not is_training_run(engine) or engine.accumulated == 0), 0)
        before, seen = seen, update
        return bool(update // interval > before // interval)

    return joined | Events.ITERATION_COMPLETED(event_filter=has_updated)
