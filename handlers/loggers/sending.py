"""Sends what is logged in a thread of its own: training waits for no service, whether that is slow or down."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from pulsetrain.engine.logs import get_logger

__all__ = ["Sender"]

Entry = TypeVar("Entry")

_AT_ONCE = 200  # entries handed to `deliver`, at most
_RETRIES = (0.2, 10.0)  # seconds to the first retry, doubled up to the longest


class Sender(Generic[Entry]):
    """Delivers entries in order. While the service is down they wait, up to a bound; then the oldest are lost.

    What is wrong is said once when it begins, and once when it ends, with how much was lost. The thread begins with
    the first entry, and keeps no process alive.

    Args:
        place: the logger's class name, for messages.
        deliver: called in the thread with the first of those that wait; returns how many of them it has delivered, at
            least 1, or raises.
        is_refusal: whether an error is the service's answer to the first of them, which is then lost, and not an
            outage.
        tell: called in the thread with the first error of an outage, and with the first refusal.
        room: bytes that may wait.
        flush_seconds: that the end of the process waits for what has not been sent.
    """

    def __init__(
        self,
        place: str,
        deliver: Callable[[Sequence[Entry]], int],
        *,
        is_refusal: Callable[[Exception], bool],
        tell: Callable[[Exception], None],
        room: int,
        flush_seconds: float,
    ) -> None:
        self.lost = 0  # entries that were never sent
        self.told = False  # whether an error has been
        self._place = place
        self._deliver = deliver
        self._is_refusal = is_refusal
        self._tell = tell
        self._room = room
        self._flush_seconds = flush_seconds
        # made here: get_logger puts Python's generator back to where it was, which another thread may have moved
        self._log: Any = get_logger("handlers")
        self._waiting: deque[tuple[int, Entry]] = deque()  # with their bytes
        self._bytes = 0
        self._first = 0  # the number of the first that waits
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ending = self._given_up = False
        self._outage: tuple[float, int] | None = None  # since when, and what had been lost before
        self._has_refused = False

    def put(self, entry: Entry, size: int) -> None:
        """Take an entry of so many bytes; never waits for the service."""
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
        """Wait for what has not been sent, then give it up; nothing is put behind this.

        Returns:
            How many entries were given up.
        """
        atexit.unregister(self.finish)
        if self._thread is None:
            return 0
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(seconds)
        with self._changed:
            given_up = len(self._waiting)
            self._given_up = True
            self._waiting.clear()
            self._changed.notify_all()
        self.lost += given_up
        if given_up:
            self._log.warning(
                f"{self._place}: gave up what could not be sent", entries=given_up, waited_seconds=seconds
            )
        return given_up

    def _run(self) -> None:
        first_delay, longest = _RETRIES
        delay = first_delay
        while True:
            with self._changed:
                while not self._waiting and not self._ending:
                    self._changed.wait()
                if not self._waiting:  # sent, or given up
                    return
                first = self._first
                entries = [entry for _, entry in islice(self._waiting, _AT_ONCE)]
            try:
                delivered = self._deliver(entries)
            except Exception as error:
                if self._given_up:
                    return
                if not self._is_refusal(error):
                    self._begin_outage(error)
                    self._pause(first_delay if self._ending else delay)
                    delay = min(2 * delay, longest)
                    continue
                delivered, refused = 1, 1
                self._say_refused(error)
            else:
                if self._given_up:
                    return
                refused = 0
                self._end_outage()
            delay = first_delay
            with self._changed:
                # those that were dropped while they were delivered are not lost
                self.lost += refused - min(self._first - first, delivered)
                while self._waiting and self._first < first + delivered:
                    self._drop_first()

    def _pause(self, seconds: float) -> None:
        """Before it is tried again; the end cuts it short."""
        with self._changed:
            was_ending = self._ending
            self._changed.wait_for(lambda: self._given_up or self._ending is not was_ending, seconds)

    def _drop_first(self) -> None:
        size, _ = self._waiting.popleft()
        self._bytes -= size
        self._first += 1

    def _say_refused(self, error: Exception) -> None:
        if self._has_refused:
            return
        self._has_refused = self.told = True
        self._log.warning(
            f"{self._place}: the service refuses an entry; it and others like it are lost", error=_text(error)
        )
        self._tell(error)

    def _begin_outage(self, error: Exception) -> None:
        if self._outage is not None:
            return
        self._outage = time.monotonic(), self.lost
        self.told = True
        self._log.warning(
            f"{self._place}: cannot reach the service; training goes on, and what it logs waits", error=_text(error)
        )
        self._tell(error)

    def _end_outage(self) -> None:
        if self._outage is None:
            return
        since, before = self._outage
        self._outage = None
        seconds = round(time.monotonic() - since, 1)
        self._log.warning(f"{self._place}: reached the service again", seconds=seconds, lost_entries=self.lost - before)


def _text(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} ..."
