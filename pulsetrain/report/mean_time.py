"""The mean time from one event of a process to another, such as that of its steps."""

from __future__ import annotations

from pulsetrain.engine.recording import LoggedEvent

__all__ = ["LOADING", "STEP", "MeanTime"]

# from an event to the one that follows it
STEP = "iteration_started", "iteration_completed"
LOADING = "get_batch_started", "get_batch_completed"


class MeanTime:
    """The mean time from an event to the next one of another type.

    >>> mean = MeanTime(*STEP)
    >>> for t, event in enumerate([*STEP, *STEP]):
    ...     mean.add(LoggedEvent(event=event, t=t * 10**9))
    >>> mean.seconds
    1.0

    Args:
        begin: the type of the first event.
        end: the type of the second.
        recent: only about so many of the newest times count; by default all do alike.
    """

    def __init__(self, begin: str, end: str, recent: int | None = None) -> None:
        self._begin, self._end, self._recent = begin, end, recent
        self._begun: int | None = None  # nanoseconds
        self._mean = 0.0
        self._count = 0

    def add(self, event: LoggedEvent) -> None:
        """Read the next event of the process; any other type is ignored."""
        if event.event == self._begin:
            self._begun = event.t
        elif event.event == self._end and self._begun is not None:
            if event.t >= self._begun:  # else the clock was set back
                self._count += 1
                weight = self._count if self._recent is None else min(self._count, self._recent)
                self._mean += (event.t - self._begun - self._mean) / weight
            self._begun = None

    @property
    def seconds(self) -> float | None:
        """The mean; None if there was no such time."""
        return self._mean / 1e9 if self._count else None
