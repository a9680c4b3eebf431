"""Compares events, as they are published, with those of a log."""

from __future__ import annotations

from collections.abc import Iterator

from pulsetrain.engine.recording.diff.fields import differing_fields, same
from pulsetrain.engine.recording.diff.result import Divergence
from pulsetrain.engine.recording.log.records import LoggedEvent, decode, encode

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

    Args:
        expected: those events, in the order of their `ord`.
    """

    def __init__(self, expected: Iterator[LoggedEvent]) -> None:
        self._expected = expected
        self._pending: dict[int, LoggedEvent] = {}  # by ord: completed before an event whose receivers still run
        self.next = next(expected, None)  # the first that has not been compared; None after the last
        self._ord = self.next.ord if self.next is not None else 0
        self.agreed = 0
        self.divergence: Divergence | None = None  # the first; `a` was expected, `b` was published

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
            if self.next.ord == now.ord:  # else the log lacks it: it was not complete when the process was killed
                if not same(self.next, now):
                    (read,) = decode(encode(now))  # as a log holds it: a payload may still be an object
                    if fields := differing_fields(self.next, read):
                        self.divergence = Divergence(now.ord, self.next, read, fields)
                        return
                self.agree(now)
                self.next = next(self._expected, None)

    def agree(self, event: LoggedEvent) -> None:
        """Count an event that is as expected."""
        self.agreed += 1

    def close(self) -> None:
        """The run has ended: nothing more is published."""
