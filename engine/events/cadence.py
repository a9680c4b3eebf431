"""Cadences as values: `Every(iterations=500) | Every(epochs=1)`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from pulsetrain.engine.argument_checks import is_whole
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.events.filters import AfterSeconds
from pulsetrain.engine.events.names import Events, EventsList

__all__ = ["Every"]


@dataclass(frozen=True, kw_only=True)
class Every:
    """A cadence: due at every n-th iteration, epoch or update, or after some seconds; `|` joins two.

    The parts are alternatives: `Every(iterations=500, epochs=1)` is due at iterations 500, 1000 ... and at the end of
    each epoch.

    Args:
        iterations: due after this many batches.
        epochs: due after this many epochs.
        updates: due after this many optimizer steps.
        seconds: due after this much wall time on the host, checked after each iteration.

    Raises:
        ValueError: a part is not positive, or none is given.
        TypeError: `seconds` is not a number, or another part not a whole number.

    >>> Every(iterations=500) | Every(epochs=1)
    Every(iterations=500, epochs=1, updates=None, seconds=None)
    >>> Every(iterations=500, epochs=1).events()
    Events.ITERATION_COMPLETED(every=500) | Events.EPOCH_COMPLETED
    """

    iterations: int | None = None
    epochs: int | None = None
    updates: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        if not given:
            raise ConfigurationError("needs at least one of iterations, epochs, updates, seconds", "Every")
        for name, value in given.items():
            if not (is_whole(value) or (name == "seconds" and isinstance(value, float))):
                number = "number" if name == "seconds" else "whole number"
                raise ArgumentTypeError(f"needs a {number}", "Every", **{name: value})
            if not value > 0:  # not (value <= 0), which NaN would pass
                raise ConfigurationError("needs a positive number", "Every", **{name: value})

    def __or__(self, other: Every) -> Every:
        """Both cadences at once; it is an error if both have the same unit with different values."""
        if not isinstance(other, Every):
            return NotImplemented
        parts: dict[str, float | None] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine is not None and theirs is not None and mine != theirs:
                rule = f"cannot join Every({field.name}={theirs!r}); one cadence per unit"
                raise ConfigurationError(rule, "Every", **{field.name: mine})
            parts[field.name] = mine if mine is not None else theirs
        return Every(**parts)  # type: ignore[arg-type]  # the values keep the types they were checked for above

    def events(self, clock: Callable[[], float] = time.monotonic) -> EventsList:
        """The filtered events that a handler of this cadence subscribes to; each call measures its own time.

        Two of them can be due at the same time, for example at the last iteration of an epoch: a handler that must not
        act twice compares iterations.

        Args:
            clock: monotonic seconds; read after each iteration if `seconds` is given.
        """
        joined = EventsList()
        if self.iterations is not None:
            joined |= Events.ITERATION_COMPLETED(every=self.iterations)
        if self.epochs is not None:
            joined |= Events.EPOCH_COMPLETED(every=self.epochs)
        if self.updates is not None:
            joined |= Events.OPTIMIZER_STEP_COMPLETED(every=self.updates)
        if self.seconds is not None:
            joined |= Events.ITERATION_COMPLETED(event_filter=AfterSeconds(self.seconds, clock))
        return joined
