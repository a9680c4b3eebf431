"""Which blocks of a tensor each process holds."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from pulsetrain.engine.blocks import held_blocks


def part_of(whole: Tensor, mesh: tuple[int, ...], at: tuple[int, ...], placements: list[Any]) -> Tensor:
    held = held_blocks(whole.shape, mesh, at, placements)
    part = torch.full(held.shape, -1)
    for offset, start, shape in held.blocks:
        theirs = whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
        part[tuple(slice(o, o + s) for o, s in zip(start, shape, strict=True))] = theirs
    return part


@pytest.mark.parametrize("shape", [(7, 3), (8, 4), (1, 2), (2, 0)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_chunk_is_that_of_torch(shape: tuple[int, int], dim: int):
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    chunks = [*whole.chunk(3, dim), *[whole.narrow(dim, 0, 0)] * 3]
    for index in range(3):
        assert part_of(whole, (3,), (index,), [Shard(dim)]).tolist() == chunks[index].tolist()


def test_each_of_several_parts_of_a_weight_is_split_by_itself():
    whole = torch.arange(24).reshape(12, 2)
    for index in range(2):
        expected = torch.cat([part.chunk(2)[index] for part in whole.chunk(3)])
        assert part_of(whole, (2,), (index,), [_StridedShard(0, split_factor=3)]).tolist() == expected.tolist()
        transposed = part_of(whole.T, (2,), (index,), [_StridedShard(1, split_factor=3)])
        assert transposed.tolist() == expected.T.tolist()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("rows", [12, 18, 6])
def test_shards_of_what_tensor_parallelism_has_split(parts: int, rows: int):
    whole = torch.arange(rows * 2).reshape(rows, 2)
    last = _StridedShard(0, split_factor=3) if parts == 3 else Shard(0)
    for shard, tensor in product(range(2), range(2)):
        mine = torch.cat([part.chunk(2)[tensor] for part in whole.chunk(parts)])
        expected = mine.chunk(2)[shard]
        found = part_of(whole, (2, 2), (shard, tensor), [_StridedShard(0, split_factor=2), last])
        assert found.tolist() == expected.tolist()


def test_dimensions_of_their_own_and_copies():
    whole = torch.arange(32).reshape(8, 4)
    found = part_of(whole, (2, 2, 2), (1, 1, 0), [Replicate(), Shard(0), Shard(1)])
    assert found.tolist() == whole[4:, :2].tolist()


def test_the_first_of_two_plain_placements_splits_first():
    whole = torch.arange(8)
    assert part_of(whole, (2, 2), (1, 0), [Shard(0), Shard(0)]).tolist() == [4, 5]


def test_a_tensor_of_one_item_is_a_block():
    assert held_blocks((), (2,), (1,), [Replicate()]).blocks == (((), (), ()),)


def test_a_sum_over_the_processes_is_not_along_a_dimension():
    with pytest.raises(ValueError, match="is not along a dimension"):
        held_blocks((2,), (2,), (0,), [Partial()])
