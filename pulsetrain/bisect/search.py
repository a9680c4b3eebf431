"""Finds what makes a result bad, by as few trials as it can: delta debugging over a set, bisection over a sequence.

Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002), give the algorithm `ddmin`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from typing import TypeVar

__all__ = ["Verdict", "causes", "first_bad", "minimal"]

T = TypeVar("T")


class Verdict(Enum):
    """The result of a trial."""

    GOOD = "good"
    BAD = "worse"
    UNRESOLVED = "unresolved"  # it failed


Judge = Callable[[Sequence[T]], Verdict]


def minimal(changes: Sequence[T], judge: Judge[T]) -> list[T]:
    """A part of the changes that is bad, and is not bad any more without any one of them.

    >>> def judge(some):
    ...     return Verdict.BAD if {"b", "d"} <= set(some) else Verdict.GOOD
    >>> minimal("abcdef", judge)
    ['b', 'd']

    Args:
        changes: all of them together are bad, and none is good.
        judge: the result of applying some of them, in the order of `changes`.
    """
    left, parts = list(changes), 2
    while len(left) > 1:
        chunks = _split(left, parts)
        smaller = next((each for each in chunks if judge(each) is Verdict.BAD), None)
        if smaller is not None:
            left, parts = smaller, 2
            continue
        rests = [[each for each in left if each not in chunk] for chunk in chunks] if parts > 2 else []
        rest = next((each for each in rests if judge(each) is Verdict.BAD), None)
        if rest is not None:
            left, parts = rest, max(parts - 1, 2)
        elif parts >= len(left):
            break
        else:
            parts = min(2 * parts, len(left))
    return left


def causes(changes: Sequence[T], judge: Judge[T]) -> list[list[T]]:
    """Minimal bad parts, one after the other, until what is left of the changes is not bad.

    >>> causes("abcdef", lambda some: Verdict.BAD if {"b", "d"} & set(some) else Verdict.GOOD)
    [['b'], ['d']]
    """
    found, left = list[list[T]](), list(changes)
    while left and judge(left) is Verdict.BAD:
        cause = minimal(left, judge)
        found.append(cause)
        left = [each for each in left if each not in cause]
    return found


def first_bad(sequence: Sequence[T], judge: Callable[[T], Verdict]) -> tuple[list[T], list[T]]:
    """The first bad one of a sequence that is good at first and bad from some place on.

    >>> first_bad([1, 2, 3, 4, 5], lambda each: Verdict.BAD if each >= 3 else Verdict.GOOD)
    ([3], [])

    Args:
        sequence: the last one is bad, and what was before the first is good.
        judge: the result of one.

    Returns:
        Those that may be the first bad one, which is a single one unless neighbours are unresolved; and these.
    """
    low, high = -1, len(sequence) - 1  # good, bad
    unresolved: set[int] = set()
    while True:
        open_ones = [at for at in range(low + 1, high) if at not in unresolved]
        if not open_ones:
            break
        at = min(open_ones, key=lambda each: abs(2 * each - low - high))
        verdict = judge(sequence[at])
        if verdict is Verdict.GOOD:
            low = at
        elif verdict is Verdict.BAD:
            high = at
        else:
            unresolved.add(at)
    return [sequence[at] for at in range(low + 1, high + 1)], [sequence[at] for at in range(low + 1, high)]


def _split(items: Sequence[T], parts: int) -> list[list[T]]:
    bounds = [len(items) * number // parts for number in range(parts + 1)]
    return [list(items[low:high]) for low, high in pairwise(bounds) if high > low]
