"""What one process leaves for the others when it fails: they would only see that a connection was closed."""

from __future__ import annotations

import json
import time
import traceback
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from pulsetrain.engine.errors import PeerFailed

__all__ = ["Failure", "FailureBoard"]

_FIRST = "failure/first"
_POLL = 0.05  # seconds
_LIMIT = 20_000  # characters of a traceback, which a store holds in memory


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
        store: that all ranks share, and that outlives a rank that fails.
        rank: of this process.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def post(self, error: BaseException, where: str = "") -> None:
        """Write the error, unless another rank was first; nothing is raised if the store has ended."""
        text = "".join(traceback.format_exception(error))[-_LIMIT:]
        try:
            self._store.compare_set(_FIRST, "", json.dumps([self._rank, where, text]))
        except RuntimeError:  # it was on a rank that has ended
            return

    def first(self) -> Failure | None:
        """The first error that was written."""
        try:
            return Failure(*json.loads(self._store.get(_FIRST))) if self._store.check([_FIRST]) else None
        except RuntimeError:  # as above
            return None

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
            time.sleep(_POLL)
