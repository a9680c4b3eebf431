"""Compares events, as they are published, with those of a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from pulsetrain.engine.recording.diff.fields import differing_fields, same
from pulsetrain.engine.recording.diff.result import Divergence
from pulsetrain.engine.recording.log.records import LoggedEvent, decode, encode, without_observed

__all__ = ["EventCheck"]


class EventCheck:
    """Compares the deterministic events of a run with the expected ones: floats by their bits.

    >>> def iteration(ord, loss):
    ...     return LoggedEvent(ord=ord, event="iteration_completed", output={"loss": loss}, seq=ord, t=10**18)
    >>> check = EventCheck(iter([iteration(0, 0.75), iteration(1, 0.5)]))
    >>> check.see(iteration(0, 0.75))
    >>> check.agreed, check.waiting
    (1, True)
    >>> check.see(iteration(1, 0.25))
    >>> check.divergence.fields
    {'output.loss': (0.5, 0.25)}

    An optional event depends on the handlers that are attached, not on what is computed. If only one side has events of
    that type, they are left out, with the fields of other events that repeat their values. `left_out` names the type.

    Args:
        expected: those events, in the order of their `ord`; optional ones also if they are incomplete.
        optional: types of events, with how the names of such fields begin.
    """

    def __init__(self, expected: Iterator[LoggedEvent], optional: Mapping[str, str] | None = None) -> None:
        self._expected, self._optional = expected, optional or {}
        self._pending: dict[int, LoggedEvent] = {}  # by ord: completed before an event whose receivers still run
        self._on_both: set[str] = set()  # optional types that both sides have
        self._not_expected: set[str] = set()  # types that are left out among the published events,
        self._not_published: set[str] = set()  # and among the expected ones
        self._extra_published = self._extra_expected = 0  # how many events were left out on each side
        self.next: LoggedEvent | None = None  # the first that has not been compared; None after the last
        self._advance()
        self._ord = self.next.ord if self.next is not None else 0
        self.agreed: int = 0
        self.divergence: Divergence | None = None  # the first; `a` was expected, `b` was published

    @property
    def left_out(self) -> list[str]:
        """The types of events that are not compared."""
        return sorted(self._not_expected | self._not_published)

    def leave_out(self, event: str) -> None:
        """Compare no event of this type, on either side."""
        self._not_expected.add(event)
        self._not_published.add(event)
        if self.next is not None and self.next.event == event:
            self._extra_expected += 1
            self._advance()

    @property
    def waiting(self) -> bool:
        """Whether expected events are left to compare."""
        return self.next is not None

    def see(self, event: LoggedEvent) -> None:
        """Compare an event that is complete."""
        if event.ord < 0 or self.divergence is not None or self.next is None:
            return
        self._pending[event.ord] = event
        while self.next is not None and (now := self._pending.pop(self._ord, None)) is not None:
            self._ord += 1
            self._compare(now)
            if self.divergence is not None:
                return

    def _compare(self, now: LoggedEvent) -> None:
        if now.event in self._not_expected:
            self._extra_published += 1
            return
        expected = self.next
        place = now.ord - self._extra_published
        if expected is None or expected.ord - self._extra_expected != place:
            return  # the log lacks it: it was not complete when the process was killed
        if expected.event != now.event:
            if self._is_extra(now, self._not_published):
                self._not_expected.add(now.event)
                self._extra_published += 1
                return
            if self._is_extra(expected, self._not_expected):
                self._not_published.add(expected.event)
                self._extra_expected += 1
                self._advance()
                self._compare(now)
                return
        elif now.event in self._optional:
            self._on_both.add(now.event)
        placed = now if now.ord == expected.ord else msgspec.structs.replace(now, ord=expected.ord)
        if not same(expected, placed):
            (read,) = decode(encode(now))  # as a log holds it: a payload may still be an object
            fields = differing_fields(without_observed(expected), without_observed(read))
            repeated = tuple(self._optional[event] for event in self.left_out if event in self._optional)
            if fields := {name: pair for name, pair in fields.items() if not name.startswith(repeated)}:
                self.divergence = Divergence(now.ord, expected, read, fields)
                return
        self.agree(now)
        self._advance()

    def _is_extra(self, event: LoggedEvent, left_out_here: set[str]) -> bool:
        """Whether the other side lacks all events of this type, as far as is known."""
        return event.event in self._optional and event.event not in self._on_both | left_out_here

    def _advance(self) -> None:
        """Go to the next expected event that is compared."""
        for event in self._expected:
            if event.event in self._not_published:
                self._extra_expected += 1
            elif not event.open:
                self.next = event
                return
        self.next = None

    def agree(self, event: LoggedEvent) -> None:
        """Count an event that is as expected."""
        self.agreed += 1

    def close(self) -> None:
        """The run has ended: nothing more is published."""
