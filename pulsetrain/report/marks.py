"""What happened at one place of a run, as marks on a timeline; however many there are, they take little memory."""

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
    """Something that happened, once or several times in a row."""

    iteration: int
    text: str
    last: int  # iteration of the last time
    count: int = 1
    kind: str = ""  # what it is among the marks of its row, such as "failed", where that is to be seen

    def __str__(self) -> str:
        if self.count == 1:
            return self.text
        return f"{self.text}, and {self.count - 1:,} more up to iteration {self.last:,}"


class Marks:
    """The marks of one row; neighbours become one where there are too many."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._size = 1  # times that a mark stands for before the next one begins

    def __iter__(self) -> Iterator[Mark]:
        return iter(self._marks)

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, iteration: int, text: str, kind: str = "") -> Mark:
        """One more, behind the others; gives the mark that stands for it."""
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
