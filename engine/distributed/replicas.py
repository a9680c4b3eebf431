"""What has to be the same on every rank: compared by digests, and named if it is not."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pulsetrain.engine.distributed.collectives import ControlGroup

__all__ = ["Difference", "differ", "difference", "digest"]

_BITS = 20  # of a part of a digest: its square, summed over thousands of ranks, is exact in float64


class Difference(NamedTuple):
    """A value that the ranks do not agree on."""

    field: str
    ranks: tuple[int, ...]  # those that differ from most of the ranks; from rank 0 if there is no majority
    values: tuple[str, ...]  # of each rank, in their order


def digest(facts: Mapping[str, object]) -> list[float]:
    """Four numbers, whose sums over the ranks say whether the values, by their `repr`, are the same on all of them.

    >>> differ([2 * each for each in digest({"rate": 0.1})], ranks=2)
    False
    >>> differ([a + b for a, b in zip(digest({"rate": 0.1}), digest({"rate": 0.2}))], ranks=2)
    True
    """
    text = repr(sorted(facts.items())).encode()
    parts = [zlib.crc32(text) >> (32 - _BITS), zlib.adler32(text) % (1 << _BITS)]
    return [float(number) for part in parts for number in (part, part * part)]


def differ(sums: Sequence[float], ranks: int) -> bool:
    """Whether digests, of which these are the sums over the ranks, differ: every rank gets the same answer."""
    return any(ranks * squares != total * total for total, squares in zip(sums[::2], sums[1::2], strict=True))


def difference(control: ControlGroup, facts: Mapping[str, object]) -> Difference | None:
    """The first value that is not the same on all ranks, which all call this; None if there is none.

    >>> from pulsetrain.engine.distributed.ranks import Ranks
    >>> difference(ControlGroup(Ranks()), {"rate": 0.1}) is None
    True
    """
    everyone = control.gather({name: repr(value) for name, value in facts.items()})
    for name in dict.fromkeys(name for each in everyone for name in each):
        values = tuple(each.get(name, "nothing") for each in everyone)
        counted = Counter(values).most_common(2)
        if len(counted) > 1:
            usual = counted[0][0] if counted[0][1] > counted[1][1] else values[0]
            ranks = tuple(rank for rank, value in enumerate(values) if value != usual)
            return Difference(name, ranks, values)
    return None
