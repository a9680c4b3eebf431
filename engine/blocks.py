"""Which parts of a tensor a process holds, where the tensor is split over a mesh of processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

__all__ = ["Block", "Held", "held_blocks"]

_Runs = list[tuple[int, int]]  # of indices along a dimension: begin and end


class Block(NamedTuple):
    """A rectangular part of a tensor, and where it is in what one process holds."""

    offset: tuple[int, ...]  # of its first item in the whole tensor
    start: tuple[int, ...]  # and in what the process holds
    shape: tuple[int, ...]


class Held(NamedTuple):
    """What a process holds of a tensor."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


def held_blocks(shape: Sequence[int], mesh: Sequence[int], at: Sequence[int], placements: Sequence[Any]) -> Held:
    """The parts of a tensor that a process of a mesh holds.

    Of two placements along one dimension of the tensor, the first one splits first. It is the last one where
    `fully_shard` has split what tensor parallelism had split before, which torch marks by `_StridedShard`. That class
    also marks a weight of several projections of equal size, each of which is split by itself (see `Colwise`).

    Args:
        shape: of the tensor.
        mesh: its shape.
        at: the process's coordinate in it.
        placements: one for each dimension of the mesh: torch's Shard, _StridedShard or Replicate.

    Raises:
        ValueError: a placement is of another type.

    >>> from torch.distributed.tensor import Shard
    >>> held_blocks((5, 2), (2,), (1,), [Shard(0)])
    Held(shape=(2, 2), blocks=(Block(offset=(3, 0), start=(0, 0), shape=(2, 2)),))
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    runs: list[_Runs] = [[(0, size)] for size in shape]
    order = list(zip(placements, mesh, at, strict=True))
    if any(type(each) is _StridedShard for each in placements[:-1]):
        order.reverse()
    touched: set[int] = set()
    for placement, count, index in order:
        if type(placement) is Replicate:
            continue
        if type(placement) not in (Shard, _StridedShard):
            raise ValueError(f"{placement} is not along a dimension")
        along = placement.dim % len(shape)
        packed = type(placement) is _StridedShard and along not in touched
        parts = placement.split_factor if packed else 1
        runs[along] = _cut(runs[along], parts, count, index)
        touched.add(along)
    blocks = [
        Block(
            tuple(begin for begin, _, _ in each),
            tuple(start for _, _, start in each),
            tuple(end - begin for begin, end, _ in each),
        )
        for each in product(
            *([(*run, start) for run, start in zip(along, _starts(along), strict=True)] for along in runs)
        )
    ]
    return Held(tuple(sum(end - begin for begin, end in along) for along in runs), tuple(blocks))


def _cut(runs: _Runs, parts: int, count: int, index: int) -> _Runs:
    """Of each of the parts, the chunk with this index of so many; chunks are those of torch.chunk."""
    size = sum(end - begin for begin, end in runs) // parts
    chunk = -(-size // count)
    begin, end = min(index * chunk, size), min((index + 1) * chunk, size)
    found: _Runs = []
    for part in range(parts):
        first, last, passed = part * size + begin, part * size + end, 0
        for low, high in runs:
            inside = max(low, low + first - passed), min(high, low + last - passed)
            if inside[0] < inside[1]:
                found.append(inside)
            passed += high - low
    return found


def _starts(runs: _Runs) -> list[int]:
    starts, passed = [], 0
    for begin, end in runs:
        starts.append(passed)
        passed += end - begin
    return starts
