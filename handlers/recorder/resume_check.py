"""Compares what a resumed run computes again with what the log holds of it: a proof, or the place where it fails."""

from __future__ import annotations

from collections.abc import Iterator

from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording import EventCheck, EventLog, LoggedEvent
from pulsetrain.engine.recording.diff.result import describe_event, format_value

__all__ = ["ResumeCheck"]

_ENDS = ("terminate", "completed", "interrupt", "exception_raised")


class ResumeCheck(EventCheck):
    """The deterministic events that a log holds past a checkpoint, and whether they come again: by their bits."""

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
    def difference(self) -> str | None:
        """The first, both sides of it."""
        found = self.divergence
        if found is None:
            return None
        before, now = found.a, found.b
        named = describe_event(before)
        if (before.engine, before.event) != (now.engine, now.event):
            return f"{named} is in the log; {now.engine}'s {now.event} at iteration {now.iteration} came in its place"
        sides = [
            f"{name}: {format_value(left)} in the log, {format_value(right)} now"
            for name, (left, right) in found.fields.items()
        ]
        return f"{named}: {'; '.join(sides)}"

    def see(self, event: LoggedEvent) -> None:
        """An event of the resumed run; says once where the first difference is, or that all has come again."""
        undecided = self.waiting and self.divergence is None
        super().see(event)
        if undecided and self.divergence is not None:
            get_logger("handlers").warning(
                "resumed, but what is computed again is not what the log holds: the runs differ from here on",
                first=self.difference,
                agreed_before=self.agreed,
            )
        elif undecided and not self.waiting:
            get_logger("handlers").info(
                "resumed exactly: what the log held past the checkpoint was computed again, to the bit",
                events=self.agreed,
            )


def _repeated(log: EventLog, attempt: tuple[int, int], engine: str) -> Iterator[LoggedEvent]:
    for event in log.attempt(*attempt):
        if event.engine == engine and event.event in _ENDS:
            return
        if event.ord >= 0 and not event.open:
            yield event
