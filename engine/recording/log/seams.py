"""Which events of a log count: those that a resumed run has computed again are superseded."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["in_force"]


def in_force(seams: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges of seq, both ends excluded, that the newest attempt has superseded.

    An attempt that started from a checkpoint of an earlier one continues that: the seams of attempts since then, which
    ended in nothing, do not count.

    Args:
        seams: `after` and seq of each.

    >>> in_force([(3, 10), (6, 20)])  # the second attempt continues the first one, whose events 4 to 6 count again
    [(6, 20)]
    >>> in_force([(3, 10), (15, 20)])
    [(3, 10), (15, 20)]
    """
    found: list[tuple[int, int]] = []
    for after, seam in sorted(seams, key=lambda each: each[1], reverse=True):
        if not found or seam <= found[-1][0]:
            found.append((after, seam))
    return found[::-1]
