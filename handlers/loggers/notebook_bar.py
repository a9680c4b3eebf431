"""The progress bar of a notebook: HTML below the cell, which any front end shows, and which is saved with it."""

from __future__ import annotations

import html
import time
from collections.abc import Callable

from pulsetrain.engine.durations import duration
from pulsetrain.engine.notebook import CellOutput

__all__ = ["NotebookBar"]


class NotebookBar:
    """What ProgressBar uses of a tqdm bar, below a cell.

    Args:
        total: iterations of the run; None if unknown.
        initial: iterations before it.
        clock: seconds, for the rate.
    """

    total: int | None
    n: int

    def __init__(self, total: int | None, initial: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.n = total, initial
        self._initial, self._clock, self._start = initial, clock, clock()
        self._description = self._postfix = ""
        self._output = CellOutput()

    def set_description_str(self, text: str, refresh: bool = False) -> None:
        self._description = text

    def set_postfix_str(self, text: str, refresh: bool = False) -> None:
        self._postfix = text

    def update(self, iterations: int) -> None:
        """Count iterations, and show the bar."""
        self.n += iterations
        done = f"iteration {self.n:,}" + (f"/{self.total:,} ({self.n / self.total:.0%})" if self.total else "")
        text = ", ".join(filter(None, [self._description, done, self._pace(), self._postfix]))
        extent = f'value="{self.n}" max="{self.total}"' if self.total else ""
        bar = f'<progress {extent} style="width: 100%; max-width: 40em"></progress><br><code>{html.escape(text)}</code>'
        self._output.show({"text/html": bar, "text/plain": text})

    def _pace(self) -> str:
        seconds, done = self._clock() - self._start, self.n - self._initial
        if not done or seconds <= 0:
            return ""
        left = seconds / done * (self.total - self.n) if self.total else 0.0
        remaining = f", {duration(left)} left" if left > 0 else ""
        return f"{duration(seconds)}{remaining}, {done / seconds:,.1f} it/s"

    def close(self) -> None:
        """It stays below the cell as it is."""
