"""What has to be the same on every rank: compared by digests, and named if it is not."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pulsetrain.engine.distributed.collectives import ControlGroup

__all__ = ["Difference", "differ", "difference", "digest"]

# bits of a part of a digest, and parts: the squares of 2**17 ranks, each below 2**36, add up to at most 2**53, which is
# exact in float64
_BITS, _PARTS = 18, 3


class Difference(NamedTuple):
    """A value that the ranks do not agree on."""

    field: str
    ranks: tuple[int, ...]  # those that differ from most of the ranks; from rank 0 if there is no majority
    values: tuple[str, ...]  # of each rank, in their order


def digest(facts: Mapping[str, object]) -> list[float]:
    """Six numbers, whose sums over the ranks say whether the values, by their `repr`, are the same on all of them.

    They are sums of whole numbers, exact for up to 131,072 ranks.

    >>> differ([2 * each for each in digest({"rate": 0.1})], ranks=2)
    False
    >>> differ([a + b for a, b in zip(digest({"rate": 0.1}), digest({"rate": 0.2}))], ranks=2)
    True
    """
    text = repr(sorted(facts.items())).encode()
    bits = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    parts = [bits >> (_BITS * at) & ((1 << _BITS) - 1) for at in range(_PARTS)]
    return [float(number) for part in parts for number in (part, part * part)]


def differ(sums: Sequence[float], ranks: int) -> bool:
    """Whether digests, of which these are the sums over the ranks, differ: every rank gets the same answer."""
    # in whole numbers: the products are larger than what float64 holds exactly
    pairs = zip(map(int, sums[::2]), map(int, sums[1::2]), strict=True)
    return any(ranks * squares != total * total for total, squares in pairs)


def difference(control: ControlGroup, facts: Mapping[str, object]) -> Difference | None:
    """The first value that is not the same on all ranks, which all call this; None if there is none.

    Digests say which one it is, and it alone is gathered: a rank may have as many values as the model has tensors.

    >>> from pulsetrain.engine.distributed.ranks import Ranks
    >>> difference(ControlGroup(Ranks()), {"rate": 0.1}) is None
    True
    """
    texts, ranks = {name: repr(value) for name, value in facts.items()}, control.ranks.world_size
    if differ(control.sum(digest({"names": list(texts)}), "comparing the names of what is replicated"), ranks):
        everyone = control.gather(texts)
        names = dict.fromkeys(name for each in everyone for name in each)
        found = (_difference(name, [each.get(name, "nothing") for each in everyone]) for name in names)
        return next(filter(None, found), None)
    digests = [digest({name: text}) for name, text in texts.items()]
    sums = iter(control.sum([number for each in digests for number in each], "comparing what is replicated"))
    for (name, text), own in zip(texts.items(), digests, strict=True):
        if differ([next(sums) for _ in own], ranks):
            return _difference(name, control.gather(text))
    return None


def _difference(name: str, values: Sequence[str]) -> Difference | None:
    counted = Counter(values).most_common(2)
    if len(counted) == 1:
        return None
    usual = counted[0][0] if counted[0][1] > counted[1][1] else values[0]
    return Difference(name, tuple(rank for rank, value in enumerate(values) if value != usual), tuple(values))
