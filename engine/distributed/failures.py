"""What one process leaves for the others when it fails: they would only see that a connection was closed."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from pulsetrain.engine.errors import PeerFailed

__all__ = ["Failure", "FailureBoard", "Warden", "look_interval"]

_FIRST, _FINDER, _READ, _ALIVE, _DONE = "failure/first", "failure/finder", "failure/read/", "alive/", "done/"
_READING = 3.0  # seconds that the others have for it
_POLL = 0.05  # seconds
_LEAVING = 1.0  # seconds that a warden's thread has for its last requests
_LIMIT = 20_000  # characters of a traceback, which a store holds in memory
_STORE_RATE = 10_000.0  # requests a second to one store, by all ranks together, for one purpose
_OF_A_LOOK = 4  # requests of a warden's look


def look_interval(least: float, requests: int, ranks: int) -> float:
    """Seconds between two looks of a rank at the store: longer if many ranks look, since one process answers all.

    >>> [look_interval(1.0, requests=4, ranks=ranks) for ranks in (8, 2_500, 10_000)]
    [1.0, 1.0, 4.0]

    Args:
        least: seconds, with few ranks.
        requests: that a rank makes each time.
        ranks: how many of them look.
    """
    return max(least, requests * ranks / _STORE_RATE)


class Failure(NamedTuple):
    """The error of a rank."""

    rank: int
    where: str  # event and iteration, as far as they are known
    text: str  # its traceback

    def as_error(self) -> PeerFailed:
        """The error for the other ranks."""
        where = f" at {self.where}" if self.where else ""
        return PeerFailed(f"rank {self.rank} has failed{where}, so this one cannot continue:\n{self.text.rstrip()}")


class FailureBoard:
    """Where the first rank to fail writes its error, for the others to read.

    >>> from torch.distributed import HashStore
    >>> board = FailureBoard(HashStore(), rank=1)
    >>> board.first() is None
    True
    >>> board.post(ValueError("no data"), where="iteration 3")
    >>> board.first().rank, board.first().text.strip(), board.first_of_others()
    (1, 'ValueError: no data', None)

    Args:
        store: shared by all ranks.
        rank: of this process.
        readers: ranks that have to read an error before this process may end, since the store ends with it.
        host: the rank whose process holds the store; None if the store outlives all ranks.
        ranks: how many there are.
    """

    def __init__(
        self, store: Store, rank: int, readers: Sequence[int] = (), host: int | None = None, ranks: int = 1
    ) -> None:
        self._store, self._rank, self._readers, self._host = store, rank, readers, host
        self.ranks = ranks
        self._poll = look_interval(_POLL, 1, ranks)
        self._read: Failure | None = None  # the store may have ended since
        self._run = 0
        self._is_lost = False  # whether the store has ended

    def begin_run(self) -> None:
        """Another run begins, in every process: the errors of the last one do not count."""
        self._run, self._read = self._run + 1, None

    def _key(self, name: str) -> str:
        return f"run-{self._run}/{name}"

    def post(self, error: BaseException, where: str = "") -> None:
        """Write the error, unless another rank was first; nothing is raised if the store has ended."""
        text = "".join(traceback.format_exception(error))[-_LIMIT:]
        try:
            self._store.compare_set(self._key(_FIRST), "", json.dumps([self._rank, where, text]))
            self._store.set(self._key(f"{_READ}{self._rank}"), "")  # it will not read another one
            self._store.wait([self._key(f"{_READ}{rank}") for rank in self._readers], timedelta(seconds=_READING))
        except RuntimeError:  # it was on a rank that has ended; or a reader has
            return

    def is_finder(self) -> bool:
        """Whether this rank is the one that finds out for all what has failed: the first to ask."""
        try:
            return self._store.compare_set(self._key(_FINDER), "", str(self._rank)) == str(self._rank).encode()
        except RuntimeError:  # the store has ended
            return True

    def beat(self) -> None:
        """Show that this rank is alive; a store that has ended is noted."""
        if self._is_lost:
            return
        try:
            self._store.add(self._key(f"{_ALIVE}{self._rank}"), 1)
        except RuntimeError:
            self._is_lost = True

    def lost(self) -> PeerFailed | None:
        """The error of a run whose processes cannot meet any more, since the launcher has ended; else None.

        A store that ends with a rank says nothing: that rank's run may have ended first.
        """
        self.beat()
        if not self._is_lost or self._host is not None:
            return None
        return PeerFailed(
            "the launcher, where the processes of the run meet, has ended, so this one cannot continue: perhaps it was "
            "killed; resume from the newest checkpoint"
        )

    def leave(self) -> None:
        """This rank's run has ended: it gives no further signs of life."""
        with suppress(RuntimeError):
            self._store.set(self._key(f"{_DONE}{self._rank}"), "")

    def beats_of(self, rank: int) -> int | None:
        """How often a rank has shown that it is alive; None if it has left, or has not joined yet."""
        if self._is_lost:
            return None
        try:
            if self._store.check([self._key(f"{_DONE}{rank}")]):
                return None
            return self._store.add(self._key(f"{_ALIVE}{rank}"), 0) or None
        except RuntimeError:  # the store has ended
            return None

    def ended(self, ranks: Sequence[int], within: float) -> list[int]:
        """Which of these ranks have not beaten within so many seconds; the host if the store has ended.

        It takes longer if there are thousands of ranks, which beat less often.

        >>> from torch.distributed import HashStore
        >>> FailureBoard(HashStore(), rank=0).ended([1], within=0.01)
        [1]
        """
        try:
            before = [self._store.add(self._key(f"{_ALIVE}{rank}"), 0) for rank in ranks]
            time.sleep(look_interval(within, 3 * _OF_A_LOOK, self.ranks))
            return [
                rank
                for rank, count in zip(ranks, before, strict=True)
                if self._store.add(self._key(f"{_ALIVE}{rank}"), 0) == count
            ]
        except RuntimeError:
            return [] if self._host in (None, self._rank) else [self._host]

    def first(self) -> Failure | None:
        """The first error that was written."""
        try:
            first = self._key(_FIRST)
            if self._read is None and not self._is_lost and self._store.check([first]):
                self._read = Failure(*json.loads(self._store.get(first)))
                self._store.set(self._key(f"{_READ}{self._rank}"), "")
        except RuntimeError:  # as above
            pass
        return self._read

    def first_of_others(self, wait: float = 0.0) -> Failure | None:
        """The first error, if another rank has written it.

        Args:
            wait: seconds that it may take to appear.
        """
        until = time.monotonic() + wait
        while True:
            found = self.first()
            if found is not None or time.monotonic() >= until:
                return None if found is None or found.rank == self._rank else found
            time.sleep(self._poll)


class Warden:
    """A thread that looks for the error of another rank, and ends a process that cannot leave by itself.

    A rank that waits for one that has failed, or has lost the launcher, may wait for long: neither a signal nor an
    exception reaches the main thread while it is inside a collective. Each thread also watches the next rank: one that
    gives no sign of life has been stopped, or its machine cannot be reached, and nobody else would say so.

    Args:
        board: where the error is.
        next_rank: the one to watch, if any.
        interval: seconds between two looks; longer if there are thousands of ranks.
        grace: seconds that this process has for leaving by itself, once another rank or the launcher has ended.
        silence: seconds without a sign of the next rank after which it is taken to be frozen; at least three looks.
        leave: ends the process; by default with all stacks on stderr and the status 75.
    """

    STATUS = 75  # EX_TEMPFAIL: start again

    def __init__(
        self,
        board: FailureBoard,
        next_rank: int | None = None,
        interval: float = 1.0,
        grace: float = 10.0,
        silence: float = 12.0,
        leave: Callable[[PeerFailed], object] | None = None,
    ) -> None:
        self._board, self._grace = board, grace
        self._interval = look_interval(interval, _OF_A_LOOK, board.ranks)
        self._next, self._silence = next_rank, max(silence, 3 * self._interval)
        self._leave = leave or self._end_process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pulsetrain-warden", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """The run has ended."""
        self._ended.set()
        self._thread.join(_LEAVING)  # inside the store while Python shuts down, it would abort the process
        self._board.leave()

    def _watch(self) -> None:
        before, looks = None, 0  # the next rank's beats, and looks since they changed
        while not self._ended.wait(self._interval):
            lost = self._board.lost()
            beats = None if self._next is None else self._board.beats_of(self._next)
            before, looks = beats, looks + 1 if beats is not None and beats == before else 0
            failure = self._board.first_of_others()
            if failure is None and looks * self._interval >= self._silence:
                failure = self._frozen(looks * self._interval)
            error = failure.as_error() if failure is not None else lost
            if error is not None:
                if not self._ended.wait(self._grace):
                    self._leave(error)
                return

    def _frozen(self, seconds: float) -> Failure:
        """What the others are to read about the next rank."""
        assert self._next is not None
        error = PeerFailed(
            f"rank {self._next} has given no sign of life for {seconds:.0f} s: its process is stopped, or its machine "
            "cannot be reached"
        )
        self._board.post(error)
        return self._board.first_of_others() or Failure(self._next, "", str(error))

    def _end_process(self, error: PeerFailed) -> None:
        sys.stderr.write(f"{error}\nThis process was waiting and now exits. Its stacks:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        os._exit(self.STATUS)
