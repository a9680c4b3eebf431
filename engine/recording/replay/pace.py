"""How fast a replay plays its events."""

from __future__ import annotations

from collections.abc import Callable

from pulsetrain.engine.recording.log.records import LoggedEvent

__all__ = ["Pace"]


class Pace:
    """Waits before an event as long as the run took to reach it.

    Args:
        speed: 1.0 is as fast as the run was, 2.0 twice as fast; None never waits.
        clock: returns seconds.
        sleep: waits so many seconds.

    >>> pace = Pace(2.0, clock=lambda: 0.0, sleep=print)
    >>> pace.wait(LoggedEvent(t=0))
    >>> pace.wait(LoggedEvent(t=3_000_000_000))
    1.5
    """

    def __init__(self, speed: float | None, clock: Callable[[], float], sleep: Callable[[float], object]) -> None:
        self.speed = speed
        self._clock, self._sleep = clock, sleep
        self._began: tuple[float, int] | None = None  # when the first event was played, and that event's t

    def begin(self) -> None:
        """The next event is the first."""
        self._began = None

    def wait(self, event: LoggedEvent) -> None:
        """Wait until as much time has passed since the first event was played as had passed in the recorded run."""
        if self.speed is None:
            return
        now = self._clock()
        if self._began is None:
            self._began = now, event.t
        due = self._began[0] + (event.t - self._began[1]) / 1e9 / self.speed
        if due > now:
            self._sleep(due - now)
