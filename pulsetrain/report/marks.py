"""Marks on a run's timeline: what happened at an iteration. Their number, and their memory, is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["CUSTOM_ROWS", "OTHERS", "ROWS", "Mark", "Marks"]

ROWS = (
    "start and end",
    "epochs",
    "rollouts",
    "validations",
    "checkpoints",
    "anomalies",
)  # from the top
CUSTOM_ROWS = 8  # types of a user's own events that have a row each, below the others
OTHERS = "other events"  # the row of the rest
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
    kind: str = ""  # decides its symbol, such as "failed"; "best" is the best checkpoint so far

    def __str__(self) -> str:
        more = "" if self.count == 1 else f", and {self.count - 1:,} more up to iteration {self.last:,}"
        best = ", best so far" + (" among them" if more else "") if self.kind == "best" else ""
        return f"{self.text}{more}{best}"


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
            self._marks[-1] = _joined(self._marks[-1], mark)
            return self._marks[-1]
        self._marks.append(mark)
        if len(self._marks) > LIMIT:
            self._size *= 2
            pairs = zip(self._marks[::2], self._marks[1::2], strict=False)
            odd = self._marks[-1:] if len(self._marks) % 2 else []
            self._marks = [_joined(first, second) for first, second in pairs] + odd
        return self._marks[-1]


def _joined(first: Mark, second: Mark) -> Mark:
    """One mark for both: the one with a kind, so that its kind can still be changed by the caller that added it."""
    kept = second if second.kind and not first.kind else first
    count = first.count + second.count
    kept.iteration, kept.text, kept.last, kept.count = first.iteration, first.text, second.last, count
    return kept
