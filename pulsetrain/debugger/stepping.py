"""What the debuggers of a recorded run and of a live one have in common: moving, breaks, and watched values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from pulsetrain.debugger.breaks import Break, Breaks
from pulsetrain.engine.argument_checks import check_choice, check_whole_number
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import LoggedEvent

__all__ = ["SteppingDebugger"]


class SteppingDebugger(ABC):
    """Is at an event of a run, and moves to others. Its errors are PulsetrainErrors."""

    def __init__(self) -> None:
        self.breaks: Breaks = Breaks()
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

    def goto(
        self,
        *,
        iteration: int | None = None,
        epoch: int | None = None,
        seq: int | None = None,
        start: bool = False,
        end: bool = False,
    ) -> LoggedEvent | None:
        """Move to the first event of an iteration or epoch of the run's engine, to an event by its seq, or to an end.

        If a log does not hold it, because it was sampled or thinned, move to the next event that it holds.

        Returns:
            The event; None at the beginning.

        Raises:
            ConfigurationError: none of the arguments is given, or more than one; or the run does not reach it. A live
                run has no seq, and begins at its checkpoint.
        """
        targets = {"iteration": iteration, "epoch": epoch, "seq": seq, "start": start or None, "end": end or None}
        given = {name: value for name, value in targets.items() if value is not None}
        if len(given) != 1:
            raise ConfigurationError("needs exactly one of iteration, epoch, seq, start, end", "goto", **given)
        [(name, value)] = given.items()
        if name not in ("start", "end"):
            check_whole_number("goto", name, value, at_least=0)
        return self.move_to(name, value)

    @abstractmethod
    def move_to(self, name: str, value: int) -> LoggedEvent | None:
        """Move as `goto` says: to "start", to "end", or to the first event whose field of this name has the value."""

    def next_to(self, event: str) -> LoggedEvent | None:
        """Move to the next event of this type; None if there is none.

        Raises:
            ConfigurationError: there is no such type.
        """
        check_choice("next_to", "event", event, self.event_names)
        return self.search(lambda each: each.event == event, {event}, forward=True, or_end=False)

    def back_to(self, event: str) -> LoggedEvent | None:
        """Move back to the last event of this type; None, without a move, if there is none.

        Raises:
            ConfigurationError: there is no such type.
        """
        check_choice("back_to", "event", event, self.event_names)
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
            check_choice("add_break", "event", event, self.event_names)
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
