"""What the debuggers of a recorded run and of a live one have in common: moving, breaks, and watched values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from pulsetrain.debugger.breaks import Break, Breaks
from pulsetrain.engine.errors import unknown_name
from pulsetrain.engine.recording import LoggedEvent

__all__ = ["SteppingDebugger"]


class SteppingDebugger(ABC):
    """Is at an event of a run, and moves to others. Its errors are PulsetrainErrors."""

    def __init__(self) -> None:
        self.breaks = Breaks()
        self.watches: list[str] = []
        self.hit: Break | None = None  # at which the last continue_() or reverse_continue() stopped

    @property
    @abstractmethod
    def event_names(self) -> Sequence[str]:
        """The types of events."""

    @abstractmethod
    def check_watch(self, caller: str, name: str) -> None:
        """Raise ConfigurationError if this cannot be watched."""

    @abstractmethod
    def search(
        self, wanted: Callable[[LoggedEvent], bool], types: set[str] | None, *, forward: bool, or_end: bool
    ) -> LoggedEvent | None:
        """Move to the next event, or the last one before, that is wanted.

        Args:
            wanted: whether an event is.
            types: the types of events that can be; None for any.
            forward: whether to search after the current event or before it.
            or_end: if there is none, move to the end of the run, or to its beginning.

        Returns:
            The event; None if there is none.
        """

    def next_to(self, event: str) -> LoggedEvent | None:
        """Move to the next event of this type; None if there is none.

        Raises:
            ConfigurationError: there is no such type.
        """
        self._check_event("next_to", event)
        return self.search(lambda each: each.event == event, {event}, forward=True, or_end=False)

    def back_to(self, event: str) -> LoggedEvent | None:
        """Move back to the last event of this type; None, without a move, if there is none.

        Raises:
            ConfigurationError: there is no such type.
        """
        self._check_event("back_to", event)
        return self.search(lambda each: each.event == event, {event}, forward=False, or_end=False)

    def continue_(self) -> LoggedEvent | None:
        """Move to the next break; None, at the end of the run, if there is none."""
        return self._to_break(forward=True)

    def reverse_continue(self) -> LoggedEvent | None:
        """Move back to the last break; None, at the beginning, if there is none."""
        return self._to_break(forward=False)

    def add_break(self, event: str | None = None, condition: str | None = None) -> Break:
        """Make `continue_` and `reverse_continue` stop at events.

        Args:
            event: their type, such as "validation_completed"; None for any.
            condition: on the event's fields, such as 'metrics["val/loss"] > 3': see
                pulsetrain.engine.recording.log.predicate.

        Raises:
            ConfigurationError: there is no such type of event, or the condition is invalid.
        """
        if event is not None:
            self._check_event("add_break", event)
        return self.breaks.add(event, condition)

    def delete_break(self, number: int) -> None:
        """Delete a break.

        Raises:
            ConfigurationError: there is no such break.
        """
        self.breaks.delete(number)

    def add_watch(self, name: str) -> None:
        """Include a value in `watched`.

        Args:
            name: in a recorded run a metric, such as train/loss, or a field of the event, such as payload.grad_norm;
                in a live run an expression, such as model[0].weight.norm().

        Raises:
            ConfigurationError: there is no such value.
        """
        self.check_watch("add_watch", name)
        if name not in self.watches:
            self.watches.append(name)

    def _to_break(self, *, forward: bool) -> LoggedEvent | None:
        found = self.search(
            lambda event: self.breaks.first_at(event) is not None, self.breaks.events, forward=forward, or_end=True
        )
        self.hit = self.breaks.first_at(found)
        return found

    def _check_event(self, caller: str, event: str) -> None:
        if event not in self.event_names:
            raise unknown_name(caller, "event", event, self.event_names)
