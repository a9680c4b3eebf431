"""Compares what a resumed run computes again with what the log holds of it: a proof, or the place where it fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from engine.logs import get_logger
from engine.recording import EventLog, LoggedEvent
from engine.recording.lines import deterministic, encode

__all__ = ["ResumeCheck"]

_ENDS = ("terminate", "completed", "interrupt", "exception_raised")
_COMPARED = ("engine", "event", "epoch", "iteration", "payload", "output", "metrics", "lr", "error")


class ResumeCheck:
    """The deterministic events that a log holds past a checkpoint, and whether they come again: floats by their bits.

    Args:
        expected: those events, in the order of their `ord`.
    """

    def __init__(self, expected: Iterator[LoggedEvent]) -> None:
        self._expected = expected
        self._next = next(expected, None)
        self._place = self._next.ord if self._next is not None else 0  # of the event to be compared next
        self._come: dict[int, LoggedEvent] = {}  # by ord: before one whose receivers are running still
        self.agreed = 0
        self.difference: str | None = None  # the first, both sides of it

    @classmethod
    def of_log(cls, log: EventLog, after: int, engine: str) -> ResumeCheck | None:
        """For a run that goes on behind this seq; None where the log holds nothing past it.

        Of several attempts to go on from there the longest counts, up to where the engine's run ended: what is computed
        at an end need not come again where the run goes on.
        """
        attempts = log.attempts(after)
        if len(attempts) > 1:
            attempts.sort(key=lambda attempt: sum(1 for _ in _repeated(log, attempt, engine)))
        check = cls(_repeated(log, attempts[-1], engine))
        return check if check.waiting else None

    @property
    def waiting(self) -> bool:
        """Whether some of the log's events have not come again yet."""
        return self._next is not None

    def see(self, event: LoggedEvent) -> None:
        """An event of the resumed run; says once where the first difference is, or that all has come again."""
        if event.ord < 0 or self.difference is not None or not self.waiting:
            return
        self._come[event.ord] = event
        while self._next is not None and (now := self._come.pop(self._place, None)) is not None:
            self._place += 1
            if self._next.ord == now.ord:  # else it was not complete when the process was killed
                self._compare(self._next, now)
                self._next = next(self._expected, None) if self.difference is None else None
        if self.difference is not None:
            get_logger("handlers").warning(
                "resumed, but what is computed again is not what the log holds: the runs differ from here on",
                first=self.difference,
                agreed_before=self.agreed,
            )
        elif not self.waiting:
            get_logger("handlers").info(
                "resumed exactly: what the log held past the checkpoint was computed again, to the bit",
                events=self.agreed,
            )

    def _compare(self, before: LoggedEvent, now: LoggedEvent) -> None:
        if deterministic(before, encode(before)) == deterministic(now, encode(now)):
            self.agreed += 1
        else:
            self.difference = _difference(before, now)


def _repeated(log: EventLog, attempt: tuple[int, int], engine: str) -> Iterator[LoggedEvent]:
    for event in log.attempt(*attempt):
        if event.engine == engine and event.event in _ENDS:
            return
        if event.ord >= 0 and not event.open:
            yield event


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _difference(before: LoggedEvent, now: LoggedEvent) -> str:
    named = f"{before.engine}'s {before.event} at epoch {before.epoch}, iteration {before.iteration}"
    if (before.engine, before.event) != (now.engine, now.event):
        return f"{named} is in the log; {now.engine}'s {now.event} at iteration {now.iteration} came in its place"
    sides = [
        f"{name}: {left} in the log, {right} now"
        for name in _COMPARED
        if (left := _text(getattr(before, name))) != (right := _text(getattr(now, name)))
    ]
    return f"{named}: {'; '.join(sides)}"
