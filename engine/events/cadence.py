"""How often something happens, as a value: `Every(iterations=500) | Every(epochs=1)`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.events.filters import AfterSeconds
from pulsetrain.engine.events.names import Events, EventsList

__all__ = ["Every"]


@dataclass(frozen=True, kw_only=True)
class Every:
    """A cadence: due at every n-th iteration, epoch or update, or after so many seconds; `|` joins two.

    The parts are alternatives: `Every(iterations=500, epochs=1)` is due at iteration 500, 1000 ... and at the end of
    each epoch.

    Args:
        iterations: batches between two occasions.
        epochs: epochs between two occasions.
        updates: optimizer steps between two occasions.
        seconds: host wall time between two occasions; looked at after each iteration.

    Raises:
        ValueError: a part is not positive, or none is given.
        TypeError: a part is no number (iterations, epochs and updates: no whole number).
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
            kinds = (int, float) if name == "seconds" else (int,)
            if not isinstance(value, kinds) or isinstance(value, bool):
                number = "number" if name == "seconds" else "whole number"
                raise ArgumentTypeError(f"needs a {number}", "Every", **{name: value})
            if not value > 0:  # nor is nan
                raise ConfigurationError("needs a positive number", "Every", **{name: value})

    def __or__(self, other: Every) -> Every:
        """Both cadences at once; where both name the same unit with different values, an error."""
        if not isinstance(other, Every):
            return NotImplemented
        parts: dict[str, float] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine is not None and theirs is not None and mine != theirs:
                raise ValueError(f"Every({field.name}={mine!r}) | Every({field.name}={theirs!r}): one cadence a unit")
            if mine is not None or theirs is not None:
                parts[field.name] = mine if mine is not None else theirs
        return Every(**parts)  # type: ignore[arg-type]  # the values keep the types they were checked for above

    def events(self, clock: Callable[[], float] = time.monotonic) -> EventsList:
        """The filtered events that a handler of this cadence subscribes to; each call has its own memory of time.

        Two of them can be due at one point of training (the last iteration of an epoch): act once an iteration.

        Args:
            clock: seconds, never running backwards; read after each iteration where `seconds` is given.
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
