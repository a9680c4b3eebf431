"""Where the run loop takes its batches from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

__all__ = ["DataSource", "IterableSource"]


class DataSource(Protocol):
    """Makes iterators over the data for the run loop.

    A pass is one iteration over the data. Passes and epochs are independent: an epoch may be shorter or longer.
    """

    def begin(self, data: Iterable[object], iteration: int) -> Iterator[object]:
        """Begin a new pass, whose first batch is that of iteration + 1."""

    def resume(self, data: Iterable[object], iteration: int, epoch_length: int | None) -> tuple[Iterator[object], int]:
        """Return to where the run was after an iteration, at the start of a run.

        Returns:
            The batches from there on, and how many batches of the epoch are done.
        """


class IterableSource:
    """Iterates any iterable as pytorch-ignite does: a run that continues inside an epoch reads the data from its start.

    >>> IterableSource().resume("abcd", iteration=6, epoch_length=4)[1]
    2
    """

    def begin(self, data: Iterable[object], iteration: int) -> Iterator[object]:
        return iter(data)

    def resume(self, data: Iterable[object], iteration: int, epoch_length: int | None) -> tuple[Iterator[object], int]:
        return self.begin(data, iteration), iteration if epoch_length is None else iteration % epoch_length
