"""Compares what a resumed run computes again with the log, and reports agreement or the first difference."""

from __future__ import annotations

from collections.abc import Iterator

from pulsetrain.engine import Events
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording import EventCheck, EventLog, LoggedEvent
from pulsetrain.engine.recording.diff.result import describe_event, format_pair
from pulsetrain.engine.recording.log.records import Json

__all__ = ["OPTIONAL", "ResumeCheck", "say_nothing_to_compare"]

_ENDS = ("terminate", "completed", "interrupt", "exception_raised")
_NORM = Events.GRADIENTS_READY.value
_UPDATE = Events.OPTIMIZER_STEP_COMPLETED.value
_ITERATION = Events.ITERATION_COMPLETED.value
# fired where a handler needs the norm, so that it depends on the handlers; METRICS_LOGGED repeats the norm
OPTIONAL = {_NORM: "payload.metrics.grad_norm"}


class ResumeCheck(EventCheck):
    """Whether the deterministic events that a log holds after a checkpoint are reproduced, bit for bit.

    GRADIENTS_READY is left out where only the log or only the resumed run has such events.

    Args:
        expected: those events.
        engine: name of the engine that resumes.
        fires_updates: whether it fires OPTIMIZER_STEP_COMPLETED; if not, each iteration counts as an update.
    """

    def __init__(self, expected: Iterator[LoggedEvent], engine: str = "trainer", fires_updates: bool = True) -> None:
        super().__init__(expected, OPTIONAL)
        self.with_values: int = 0  # events that agree and carry a loss or a gradient norm,
        self.after_update: int = 0  # and of these, those that the resumed run computed after an optimizer update
        self.lacks: list[str] = []  # names of state that the checkpoint lacks
        self._engine, self._fires_updates = engine, fires_updates
        self._updated_in: int | None = None  # the iteration of the engine's first update

    @classmethod
    def of_log(cls, log: EventLog, after: int, engine: str, fires_updates: bool = True) -> ResumeCheck | None:
        """The check of a run that resumes after this seq; None where the log holds nothing after it.

        If several attempts continued from there, the longest counts, up to where the engine's run ended: what is
        computed at an end need not be reproduced by a run that continues.

        Args:
            log: the run's.
            after: seq of the checkpoint.
            engine: name of the engine that resumes.
            fires_updates: whether it fires OPTIMIZER_STEP_COMPLETED.
        """
        attempts = log.attempts(after)
        if len(attempts) > 1:
            attempts.sort(key=lambda attempt: sum(1 for _ in _repeated(log, attempt, engine)))
        check = cls(_repeated(log, attempts[-1], engine), engine, fires_updates)
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
            "{}: {} in the log, {} now".format(name, *format_pair(left, right))
            for name, (left, right) in found.fields.items()
        ]
        return f"{named}: {'; '.join(sides)}"

    def agree(self, event: LoggedEvent) -> None:
        super().agree(event)
        if _has_values(event):
            self.with_values += 1
            self.after_update += self._follows_update(event)
        updates = event.event == _UPDATE or (event.event == _ITERATION and not self._fires_updates)
        if updates and event.engine == self._engine and self._updated_in is None:
            self._updated_in = event.iteration

    def _follows_update(self, event: LoggedEvent) -> bool:
        """Whether the event's values were computed after an update: an iteration's loss comes before its update."""
        if self._updated_in is None:
            return False
        return event.engine != self._engine or event.iteration > self._updated_in

    def see(self, event: LoggedEvent) -> None:
        """Compare an event of the resumed run; logs the first difference once, or what agrees once all is compared."""
        undecided = self.waiting and self.divergence is None
        super().see(event)
        if undecided and self.divergence is not None:
            get_logger("handlers").warning(
                "resumed, but an event differs from the one in the log: the runs differ from here on",
                first=self.difference,
                agreed_before=self.agreed,
                **self._not_compared,
            )
        elif undecided and not self.waiting:
            self._report()

    def leave_out(self, event: str) -> None:
        undecided = self.waiting
        super().leave_out(event)
        if undecided and not self.waiting:
            self._report()

    def _report(self) -> None:
        """All is compared: log what agrees."""
        if self.after_update:
            get_logger("handlers").info(
                "resumed; what was compared is equal, and the checkpoint lacks state that the run had changed"
                if self.lacks
                else "resumed exactly: the events that the log held after the checkpoint were reproduced bit for bit",
                events=self.agreed,
                with_loss_or_norm=self.with_values,
                after_update=self.after_update,
                **self._not_compared,
                **({"lacks": self.lacks} if self.lacks else {}),
            )
        elif self.with_values:
            get_logger("handlers").info(
                "resumed; the events after the checkpoint agree, but no loss or gradient norm among them is known "
                "to be computed after an update of the resumed run",
                events=self.agreed,
                with_loss_or_norm=self.with_values,
                **self._not_compared,
            )
        else:
            say_nothing_to_compare("no event after the checkpoint carries a loss or a gradient norm", self.agreed)

    @property
    def _not_compared(self) -> dict[str, list[str]]:
        return {"not_compared": self.left_out} if self.left_out else {}

    def close(self) -> None:
        """The resumed run has ended: log it if some of the expected events were not compared."""
        if self.waiting and self.divergence is None:
            get_logger("handlers").info(
                "resumed; the run ended before it had repeated all events that the log held after the checkpoint",
                agreed=self.agreed,
                with_loss_or_norm=self.with_values,
                **self._not_compared,
            )


def say_nothing_to_compare(reason: str, events: int = 0) -> None:
    """Log that a resume is not proven by any computed value.

    Args:
        reason: why there is none.
        events: how many events agree.
    """
    get_logger("handlers").info("resumed; nothing to compare", reason=reason, events=events)


def _has_values(event: LoggedEvent) -> bool:
    """Whether the event carries a loss or a gradient norm."""
    return _has_number(event.output) or (event.event == _NORM and _has_number(event.payload))


def _has_number(values: Json) -> bool:
    return isinstance(values, dict) and any(value is not None for value in values.values())


def _repeated(log: EventLog, attempt: tuple[int, int], engine: str) -> Iterator[LoggedEvent]:
    for event in log.attempt(*attempt):
        if event.engine == engine and event.event in _ENDS:
            return
        if event.ord >= 0 and (event.event in OPTIONAL or not event.open):
            yield event
