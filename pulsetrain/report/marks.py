"""Marks on a run's timeline: what happened at an iteration. Their number, and their memory, is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ROWS", "Mark", "Marks"]

ROWS = (
    "start and end",
    "epochs",
    "rollouts",
    "validations",
    "checkpoints",
    "anomalies",
)  # from the top
LIMIT = 1000  # marks of one row and run


@dataclass(slots=True)
class Mark:
    """Something that happened once, or several times in a row.

    >>> print(Mark(8, "epoch 1 completed", 24, count=3))
    epoch 1 completed, and 2 more up to iteration 24
    """

    iteration: int
    text: str
    last: int  # iteration of the last time
    count: int = 1
    kind: str = ""  # decides its symbol, such as "failed"

    def __str__(self) -> str:
        if self.count == 1:
            return self.text
        return f"{self.text}, and {self.count - 1:,} more up to iteration {self.last:,}"


class Marks:
    """The marks of one row; neighbours are merged if there are too many."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._size = 1  # occurrences per mark

    def __iter__(self) -> Iterator[Mark]:
        return iter(self._marks)

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, iteration: int, text: str, kind: str = "") -> Mark:
        """Add an occurrence after the others; returns the mark that represents it."""
        mark = Mark(iteration, text, iteration, kind=kind)
        if self._size > 1 and self._marks[-1].count < self._size:
            return _joined(self._marks[-1], mark)
        self._marks.append(mark)
        if len(self._marks) > LIMIT:
            self._size *= 2
            pairs = zip(self._marks[::2], self._marks[1::2], strict=False)
            odd = self._marks[-1:] if len(self._marks) % 2 else []
            self._marks = [_joined(first, second) for first, second in pairs] + odd
        return self._marks[-1]


def _joined(first: Mark, second: Mark) -> Mark:
    first.last, first.count, first.kind = second.last, first.count + second.count, first.kind or second.kind
    return first
