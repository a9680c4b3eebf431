"""Global batches, divided among virtual ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

from pulsetrain.engine.data.keyed_loader import KeyedLoader
from pulsetrain.engine.data.virtual_loader import Shares, VirtualLoader, order_facts


class Drawing(Dataset[Tensor]):
    """Rows of their index and a random number, as an augmentation draws it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


def drawing(rows: int = 17, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Drawing(rows), 4, **{"shuffle": True, **options})


def read(loader: DataLoader[Tensor], here: range, position: int = 0, number: int = 1) -> list[Shares]:
    made: Iterator[Shares] = VirtualLoader(loader, 3, None, here, 4, run_seed=9).begin(number, position)
    return list(made)


def values(shares: Shares) -> list[Any]:
    return [None if each is None else each.tolist() for each in shares.batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_virtual_rank_reads_does_not_depend_on_the_process(workers: int):
    loader = drawing(num_workers=workers)
    whole = read(drawing(), range(4))
    halves = read(loader, range(2)), read(loader, range(2, 4))
    assert len(whole) == 5
    for one, first, second in zip(whole, *halves, strict=True):
        assert values(one) == values(first) + values(second)
        assert one.seed == first.seed == second.seed
        assert (first.first, second.first) == (0, 2)
    assert len({each.seed for each in whole}) == 5


def test_a_global_batch_has_the_samples_of_a_loader_without_virtual_ranks():
    plain = [sorted(batch[:, 0].tolist()) for batch in KeyedLoader(drawing(), 3).begin(1)]
    shared = [
        sorted(row[0] for share in values(each) if share is not None for row in share)
        for each in read(drawing(), range(4))
    ]
    assert shared == plain


def test_virtual_ranks_draw_differently():
    drawn = [row[1] for shares in read(drawing(), range(4)) for share in values(shares) if share for row in share]
    assert len(set(drawn)) == len(drawn) == 17


def test_a_virtual_rank_without_a_sample_of_the_last_batch_has_none():
    assert [each is None for each in read(drawing(), range(4))[-1].batches] == [False, True, True, True]
    assert read(drawing(), range(2, 4))[-1].batches == (None, None)  # nothing is read there, and the batch is there
    assert len(read(drawing(drop_last=True), range(2, 4))) == 4


def test_a_pass_starts_at_any_position():
    whole = read(drawing(), range(2), number=2)
    rest = read(drawing(), range(2), position=8, number=2)
    assert list(map(values, rest)) == list(map(values, whole[2:]))
    assert [each.seed for each in rest] == [each.seed for each in whole[2:]]


def test_samples_drawn_with_replacement_are_shared_out_too():
    sampler = RandomSampler(range(30), replacement=True, num_samples=10)
    shares = read(drawing(30, sampler=sampler, shuffle=False), range(4))
    assert [sum(share is not None for share in each.batches) for each in shares] == [4, 4, 2]


def test_what_decides_the_order_is_known():
    facts = order_facts(DataLoader(Subset(range(9), [1, 2]), generator=torch.Generator().manual_seed(5)), 1)
    other = order_facts(DataLoader(Subset(range(9), [1, 3]), generator=torch.Generator().manual_seed(5)), 1)
    assert facts["seed of the order"] == other["seed of the order"] == 5
    assert facts["indices of the subset"] != other["indices of the subset"]
