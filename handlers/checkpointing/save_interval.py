"""How often to save, so that saving costs no more than a share of the time."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

__all__ = ["SaveInterval"]


_LONGEST = 5.0  # times a usual iteration that one beside a save may take


class SaveInterval:
    """Tunes the iterations between two saves by what they cost (after CheckFreq, Mohan et al., FAST 2021).

    interval = ceil(cost / (share * iteration time)), anew after each save: the iterations that follow a save pay for
    it, so that the share holds also while costs change. The first save comes when the window is full.

    The cost is how long the save kept the training thread, and what the iterations beside a writing thread took longer.
    The iteration time is the median over the last `window` iterations beside which nothing was written.

    Args:
        writing: whether a save is under way beside the training.
        clock: seconds, never running backwards; read after each iteration.
        share: at most this part of the iterations' time.
        window: iterations; also the least that lie between a save that failed and the next.
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
        self._alone: deque[float] = deque(maxlen=window)  # seconds of iterations
        self._beside: list[float] = []  # likewise, while the last save was being written
        self._stall: float | None = None  # seconds of a save whose whole cost is not known yet
        self._failed = False
        self._since = 0  # iterations since the last save
        self._last: float | None = None  # when the last iteration, or the save behind it, ended

    def is_due(self, engine: object, iteration: int) -> bool:
        """To be asked once after each iteration: an event's filter."""
        now = self._clock()
        before, self._last = self._last, now
        self._since += 1
        if before is None:
            return False
        if self._stall is not None:
            self._beside.append(now - before)  # the one in which the writing ended, too
            if self._writing():
                return False
            self._tune(self._stall)
        else:
            self._alone.append(now - before)
        if self.interval is None:
            return len(self._alone) == self._alone.maxlen
        return self._since >= self.interval

    def saved(self, seconds: float) -> None:
        """A save has been made, or begun in the background, and kept the training thread so long."""
        self._stall, self._since = seconds, 0
        self._beside.clear()
        self._last = self._clock()

    def failed(self) -> None:
        """The last save could not be written: what that cost says nothing of the next one."""
        self._failed = True

    def _tune(self, stall: float) -> None:
        iteration_time = statistics.median(self._alone)
        longest = _LONGEST * iteration_time  # what takes longer did something else, such as a validation
        slower = sum(min(seconds, longest) - iteration_time for seconds in self._beside)
        cost = stall + max(slower, 0.0)
        least = (self._alone.maxlen or 1) if self._failed else 1
        # a clock too coarse to see an iteration says nothing of the interval
        paid_in = cost / (self._share * iteration_time) if iteration_time > 0 else math.inf
        self.interval = max(least, math.ceil(paid_in)) if math.isfinite(paid_in) else self._alone.maxlen
        self._stall, self._failed = None, False
