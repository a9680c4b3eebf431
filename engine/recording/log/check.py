"""Compares events as they come with those that a log holds."""

from __future__ import annotations

from collections.abc import Iterator

from pulsetrain.engine.recording.diff.fields import differing_fields, same
from pulsetrain.engine.recording.diff.result import Divergence
from pulsetrain.engine.recording.log.records import LoggedEvent

__all__ = ["EventCheck"]


class EventCheck:
    """The deterministic events that are expected, and whether they come: floats by their bits.

    Args:
        expected: those events, in the order of their `ord`.
    """

    def __init__(self, expected: Iterator[LoggedEvent]) -> None:
        self._expected = expected
        self._come: dict[int, LoggedEvent] = {}  # by ord: before one whose receivers are running still
        self.next = next(expected, None)  # the one that has not come yet; None where all have
        self._place = self.next.ord if self.next is not None else 0
        self.agreed = 0
        self.divergence: Divergence | None = None  # the first; `a` was expected, `b` came

    @property
    def waiting(self) -> bool:
        """Whether some of the expected events have not come yet."""
        return self.next is not None

    def see(self, event: LoggedEvent) -> None:
        """An event has come, and is complete."""
        if event.ord < 0 or self.divergence is not None or self.next is None:
            return
        self._come[event.ord] = event
        while self.next is not None and (now := self._come.pop(self._place, None)) is not None:
            self._place += 1
            if self.next.ord == now.ord:  # else it was not complete when the process was killed
                if not same(self.next, now) and (fields := differing_fields(self.next, now)):
                    self.divergence = Divergence(now.ord, self.next, now, fields)
                    return
                self.agreed += 1
                self.next = next(self._expected, None)
