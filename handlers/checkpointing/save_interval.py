"""How often to save, so that saving costs at most a share of the time."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

__all__ = ["SaveInterval"]


_LONGEST = 5.0  # times the usual iteration time; slower iterations during a save count as this


class SaveInterval:
    """Tunes the number of iterations between two saves by what a save costs (CheckFreq, Mohan et al., FAST 2021).

    interval = ceil(cost / (share * iteration time)), computed after each save: the iterations that follow a save pay
    for it, so that the share holds while costs change. The first save is due when the window is full.

    The cost is the time that the save blocked the training thread, and the time by which a writing thread slowed the
    iterations. The iteration time is the median of the last `window` iterations during which nothing was written.

    Args:
        writing: whether a save is being written in the background.
        clock: seconds, never running backwards; read after each iteration.
        share: of the iterations' time, the most that saving may cost.
        window: iterations; also the least number between a failed save and the next.

    >>> seconds = 0.0
    >>> interval = SaveInterval(clock=lambda: seconds, share=0.05, window=8)
    >>> for iteration in range(1, 10):  # of one second each
    ...     seconds += 1.0
    ...     due = interval.is_due(None, iteration)
    >>> interval.saved(2.0), interval.is_due(None, 10), interval.interval
    (None, False, 40)
    """

    def __init__(
        self,
        writing: Callable[[], bool] = lambda: False,
        *,
        clock: Callable[[], float] = time.perf_counter,
        share: float = 0.035,
        window: int = 50,
    ) -> None:
        self.interval: int | None = None  # iterations; None until the first save has been paid
        self._writing, self._clock, self._share = writing, clock, share
        self._alone: deque[float] = deque(maxlen=window)  # seconds of iterations without a save
        self._beside: list[float] = []  # seconds of iterations while the last save was written
        self._stall: float | None = None  # seconds that the last save blocked training, until its whole cost is known
        self._failed = False
        self._since = 0  # iterations since the last save
        self._last: float | None = None  # when the last iteration, or the save after it, ended

    def is_due(self, engine: object, iteration: int) -> bool:
        """Whether to save now; an event filter, to be called once after each iteration."""
        now = self._clock()
        before, self._last = self._last, now
        self._since += 1
        if before is None:
            return False
        if self._stall is not None:
            self._beside.append(now - before)  # including the one in which the writing ended
            if self._writing():
                return False
            self._tune(self._stall)
        else:
            self._alone.append(now - before)
        if self.interval is None:
            return len(self._alone) == self._alone.maxlen
        return self._since >= self.interval

    def saved(self, seconds: float) -> None:
        """A save was made, or begun in the background, and blocked the training thread for this time."""
        self._stall, self._since = seconds, 0
        self._beside.clear()
        self._last = self._clock()

    def failed(self) -> None:
        """The last save failed: its cost says nothing about the next one."""
        self._failed = True

    def _tune(self, stall: float) -> None:
        iteration_time = statistics.median(self._alone)
        longest = _LONGEST * iteration_time  # a slower one did something else, such as a validation
        slower = sum(min(seconds, longest) - iteration_time for seconds in self._beside)
        cost = stall + max(slower, 0.0)
        least = (self._alone.maxlen or 1) if self._failed else 1
        # a clock too coarse to measure an iteration gives no interval
        paid_in = cost / (self._share * iteration_time) if iteration_time > 0 else math.inf
        self.interval = max(least, math.ceil(paid_in)) if math.isfinite(paid_in) else self._alone.maxlen
        self._stall, self._failed = None, False
