"""Compares what a resumed run computes again with the log, and reports agreement or the first difference."""

from __future__ import annotations

from collections.abc import Iterator

from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording import EventCheck, EventLog, LoggedEvent
from pulsetrain.engine.recording.diff.result import describe_event, format_value

__all__ = ["ResumeCheck"]

_ENDS = ("terminate", "completed", "interrupt", "exception_raised")


class ResumeCheck(EventCheck):
    """Whether the deterministic events that a log holds after a checkpoint are reproduced, bit for bit."""

    @classmethod
    def of_log(cls, log: EventLog, after: int, engine: str) -> ResumeCheck | None:
        """The check of a run that resumes after this seq; None where the log holds nothing after it.

        If several attempts continued from there, the longest counts, up to where the engine's run ended: what is
        computed at an end need not be reproduced by a run that continues.
        """
        attempts = log.attempts(after)
        if len(attempts) > 1:
            attempts.sort(key=lambda attempt: sum(1 for _ in _repeated(log, attempt, engine)))
        check = cls(_repeated(log, attempts[-1], engine))
        return check if check.waiting else None

    @property
    def difference(self) -> str | None:
        """The first difference, with both sides."""
        found = self.divergence
        if found is None:
            return None
        before, now = found.a, found.b
        named = describe_event(before)
        if (before.engine, before.event) != (now.engine, now.event):
            return f"{named} is in the log; {now.engine}'s {now.event} at iteration {now.iteration} was fired instead"
        sides = [
            f"{name}: {format_value(left)} in the log, {format_value(right)} now"
            for name, (left, right) in found.fields.items()
        ]
        return f"{named}: {'; '.join(sides)}"

    def see(self, event: LoggedEvent) -> None:
        """Compare an event of the resumed run; logs the first difference once, or that everything was reproduced."""
        undecided = self.waiting and self.divergence is None
        super().see(event)
        if undecided and self.divergence is not None:
            get_logger("handlers").warning(
                "resumed, but an event differs from the one in the log: the runs differ from here on",
                first=self.difference,
                agreed_before=self.agreed,
            )
        elif undecided and not self.waiting:
            get_logger("handlers").info(
                "resumed exactly: the events that the log held after the checkpoint were reproduced bit for bit",
                events=self.agreed,
            )


def _repeated(log: EventLog, attempt: tuple[int, int], engine: str) -> Iterator[LoggedEvent]:
    for event in log.attempt(*attempt):
        if event.engine == engine and event.event in _ENDS:
            return
        if event.ord >= 0 and not event.open:
            yield event
