"""Finds what makes a result bad, by as few trials as it can: delta debugging over a set, bisection over a history.

Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002), give the algorithm `ddmin`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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


def first_bad(parents: Mapping[T, Collection[T]], judge: Callable[[T], Verdict]) -> tuple[list[T], list[T]]:
    """The first bad one of a history with branches and merges, in which everything after a bad one is bad.

    A good one excludes what comes before it; a bad one limits the search to what comes before it.

    >>> history = {"a": [], "b": ["a"], "side": ["a"], "merge": ["b", "side"]}
    >>> first_bad(history, lambda each: Verdict.BAD if each in ("b", "merge") else Verdict.GOOD)
    (['b'], [])

    Args:
        parents: of each, which precede it in the mapping; those that are not in it are good. The last one is bad, and
            comes after all others.
        judge: the result of one.

    Returns:
        Those that may be the first bad one, which is a single one unless neighbours are unresolved; and these.
    """
    order = list(parents)
    bits = {each: 1 << at for at, each in enumerate(order)}
    before: dict[T, int] = {}  # as bits: itself and its ancestors
    for each in order:
        before[each] = bits[each]
        for parent in parents[each]:
            before[each] |= before.get(parent, 0)
    bad, left, unresolved = order[-1], before[order[-1]], 0

    def excluded(each: T) -> int:
        """How many are excluded at least by judging it."""
        count = (before[each] & left).bit_count()
        return min(count, left.bit_count() - count)

    while open_ones := [each for each in order if bits[each] & left & ~unresolved and each != bad]:
        at = max(open_ones, key=excluded)
        verdict = judge(at)
        if verdict is Verdict.GOOD:
            left &= ~before[at]
        elif verdict is Verdict.BAD:
            bad, left = at, left & before[at]
        else:
            unresolved |= bits[at]
    suspects = [each for each in order if bits[each] & left]
    return suspects, suspects[:-1]


def _split(items: Sequence[T], parts: int) -> list[list[T]]:
    bounds = [len(items) * number // parts for number in range(parts + 1)]
    return [list(items[low:high]) for low, high in pairwise(bounds) if high > low]
