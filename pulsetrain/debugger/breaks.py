"""Breaks: the events at which a debugger stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.log.predicate import predicate

__all__ = ["Break", "Breaks"]


@dataclass(frozen=True)
class Break:
    """Stops at events of a type, or for which a condition is true, or both."""

    number: int
    event: str | None  # the type; None for any
    condition: str | None  # as it was written
    is_true: Callable[[LoggedEvent], bool]  # the condition

    def __str__(self) -> str:
        condition = "" if self.condition is None else f" if {self.condition}"
        return f"{self.number}: {'any event' if self.event is None else self.event}{condition}"

    def stops_at(self, event: LoggedEvent) -> bool:
        """Whether it stops at this event."""
        return (self.event is None or event.event == self.event) and self.is_true(event)


class Breaks(dict[int, Break]):
    """The breaks by their numbers.

    >>> breaks = Breaks()
    >>> print(breaks.add("iteration_completed", 'output["loss"] > 4'))
    1: iteration_completed if output["loss"] > 4
    >>> breaks.first_at(LoggedEvent(event="iteration_completed", output={"loss": 5.0})).number
    1
    """

    def add(self, event: str | None, condition: str | None) -> Break:
        """Add a break.

        Raises:
            ConfigurationError: there is neither an event nor a condition, or the condition is invalid.
        """
        if event is None and condition is None:
            rule = "needs one of the two; next() stops at each event"
            raise ConfigurationError(rule, "add_break", event=event, condition=condition)
        is_true = predicate(condition) if condition is not None else lambda event: True
        number = max(self, default=0) + 1
        self[number] = made = Break(number, event, condition, is_true)
        return made

    def delete(self, number: int) -> None:
        """Delete a break.

        Raises:
            ConfigurationError: there is no such break.
        """
        if number not in self:
            there = ", ".join(map(str, self)) or "none"
            raise ConfigurationError(f"no such break; there are {there}", "delete_break", number=number)
        del self[number]

    def first_at(self, event: LoggedEvent | None) -> Break | None:
        """The first break that stops at the event."""
        return next((each for each in self.values() if event is not None and each.stops_at(event)), None)

    @property
    def events(self) -> set[str] | None:
        """The types of events that any break can stop at; None for all types."""
        types = {each.event for each in self.values()}
        return None if None in types else {str(each) for each in types}
