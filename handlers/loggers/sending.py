"""Sends what is logged in a separate thread, so that training never waits for a slow or unreachable service."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from pulsetrain.engine.logs import get_logger

__all__ = ["Sender"]

Entry = TypeVar("Entry")

_AT_ONCE = 200  # entries passed to `deliver`, at most
_RETRIES = (0.2, 10.0)  # seconds before the first retry, doubled up to the longest


class Sender(Generic[Entry]):
    """Delivers entries in order. While the service is down they wait, up to a limit; beyond it the oldest are lost.

    An outage is logged once when it starts and once when it ends, with the number of lost entries. The thread starts
    with the first entry, and does not keep the process alive.

    Args:
        place: the logger's class name, for messages.
        deliver: called in the thread with the first waiting entries; returns how many it has delivered, at least 1, or
            raises.
        is_refusal: whether an error means that the service rejects the first of these entries, which is then lost. Any
            other error is an outage.
        report: called in the thread with the first error of an outage, and with the first refusal.
        room: bytes that may wait.
        flush_seconds: how long the end of the process waits for unsent entries.

    >>> sent = []
    >>> sender = Sender("Example", lambda entries: sent.extend(entries) or len(entries), is_refusal=bool, report=print,
    ...     room=1000, flush_seconds=1.0)
    >>> sender.put("first", 5)
    >>> sender.put("second", 6)
    >>> sender.finish(seconds=5.0), sent
    (0, ['first', 'second'])
    """

    reported: bool

    def __init__(
        self,
        place: str,
        deliver: Callable[[Sequence[Entry]], int],
        *,
        is_refusal: Callable[[Exception], bool],
        report: Callable[[Exception], None],
        room: int,
        flush_seconds: float,
    ) -> None:
        self.lost: int = 0  # entries that were never sent
        self.reported = False  # whether an error has been reported
        self._place = place
        self._deliver = deliver
        self._is_refusal = is_refusal
        self._report = report
        self._room = room
        self._flush_seconds = flush_seconds
        # created here: get_logger() restores Python's random state, which another thread may have advanced
        self._log = get_logger("handlers")
        self._waiting: deque[tuple[int, Entry]] = deque()  # (bytes, entry)
        self._bytes = 0
        self._first = 0  # number of the first waiting entry
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ending = self._abandoned = False
        self._outage: tuple[float, int] | None = None  # start, and entries lost before
        self._has_refused = False

    def put(self, entry: Entry, size: int) -> None:
        """Add an entry of so many bytes; never waits for the service."""
        with self._changed:
            self._waiting.append((size, entry))
            self._bytes += size
            while self._bytes > self._room and len(self._waiting) > 1:
                self._drop_first()
                self.lost += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._place, daemon=True)
                self._thread.start()
                atexit.register(self.finish, self._flush_seconds)
            self._changed.notify_all()

    def finish(self, seconds: float) -> int:
        """Wait for unsent entries, then discard them. No entry may be added afterwards.

        Returns:
            How many entries were discarded.
        """
        atexit.unregister(self.finish)
        if self._thread is None:
            return 0
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(seconds)
        with self._changed:
            discarded = len(self._waiting)
            self._abandoned = True
            self._waiting.clear()
            self._changed.notify_all()
        self.lost += discarded
        if discarded:
            self._log.warning(
                f"{self._place}: discarded what could not be sent", entries=discarded, waited_seconds=seconds
            )
        return discarded

    def report_refusal(self, error: Exception) -> None:
        """Warn of the first; called in the thread."""
        if not self._has_refused:
            self._has_refused = True
            self._warn("the service rejects an entry; it and others like it are lost", error)

    def _run(self) -> None:
        first_delay, longest = _RETRIES
        delay = first_delay
        while True:
            with self._changed:
                while not self._waiting and not self._ending:
                    self._changed.wait()
                if not self._waiting:  # all sent, or discarded
                    return
                first = self._first
                entries = [entry for _, entry in islice(self._waiting, _AT_ONCE)]
            try:
                delivered = self._deliver(entries)
            except Exception as error:
                if self._abandoned:
                    return
                if not self._is_refusal(error):
                    self._begin_outage(error)
                    self._pause(first_delay if self._ending else delay)
                    delay = min(2 * delay, longest)
                    continue
                delivered, refused = 1, 1
                self.report_refusal(error)
            else:
                if self._abandoned:
                    return
                refused = 0
                self._end_outage()
            delay = first_delay
            with self._changed:
                # entries that were dropped while they were being delivered are not lost
                self.lost += refused - min(self._first - first, delivered)
                while self._waiting and self._first < first + delivered:
                    self._drop_first()

    def _pause(self, seconds: float) -> None:
        """Wait before the next attempt; `finish` cuts this short."""
        with self._changed:
            was_ending = self._ending
            self._changed.wait_for(lambda: self._abandoned or self._ending is not was_ending, seconds)

    def _drop_first(self) -> None:
        size, _ = self._waiting.popleft()
        self._bytes -= size
        self._first += 1

    def _begin_outage(self, error: Exception) -> None:
        if self._outage is None:
            self._outage = time.monotonic(), self.lost
            self._warn("cannot reach the service; training continues, and what it logs waits", error)

    def _warn(self, what: str, error: Exception) -> None:
        self.reported = True
        text = str(error).strip() or type(error).__name__
        self._log.warning(f"{self._place}: {what}", error=text if len(text) <= 300 else f"{text[:300]} ...")
        self._report(error)

    def _end_outage(self) -> None:
        if self._outage is None:
            return
        since, before = self._outage
        self._outage = None
        seconds = round(time.monotonic() - since, 1)
        self._log.warning(f"{self._place}: reached the service again", seconds=seconds, lost_entries=self.lost - before)
