"""Which models and which data several processes may train on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    random_split,
)

from pulsetrain.engine import ConfigurationError
from pulsetrain.engine.distributed.ranks import check_shared, gives_all_ranks_the_same
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import RANKS, shared_loader


class OwnSampler(Sampler[int]):
    """A user's sampler, or batch sampler, which may share the samples out."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)


class OwnLoader(DataLoader[Any]):
    """A user's loader, which may share the samples out."""


class Stream(IterableDataset[Any]):
    """A user's stream, which may read its rank's files alone."""

    def __iter__(self) -> Iterator[Any]:
        return iter(pairs(8))


DATA = pairs(16)


SAME_ON_ALL = {
    "in_order": lambda: DataLoader(DATA, 4),
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "shuffled_by_a_generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator()),
    "drawn_with_replacement": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)),
    "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 16, 16)),
    "batch_sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)),
    "without_batches": lambda: DataLoader(DATA, batch_size=None),
    "training_split": lambda: DataLoader(random_split(DATA, [12, 4])[0], 4, shuffle=True),
}


PERHAPS_OWN = {
    "distributed_sampler": lambda: shared_loader(0, 16),
    "batches_of_a_distributed_sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, RANKS, 0), 4, False)
    ),
    "own_sampler": lambda: DataLoader(DATA, 4, sampler=OwnSampler(0, 2, 4, 6)),
    "own_batch_sampler": lambda: DataLoader(DATA, batch_sampler=OwnSampler([0, 2], [4, 6])),
    "draws_of_its_own": lambda: DataLoader(
        DATA, 4, sampler=RandomSampler(DATA, replacement=True, generator=torch.Generator().manual_seed(0))
    ),
    "own_loader": lambda: OwnLoader(DATA, 4),
    "stream": lambda: DataLoader(Stream(), 4),
    "part_of_the_rank": lambda: DataLoader(Subset(DATA, range(0, 16, RANKS)), 4, shuffle=True),
    "part_of_a_split": lambda: DataLoader(Subset(random_split(DATA, [13, 3])[0], range(0, 13, RANKS)), 4),
    "list": lambda: [DATA[:4], DATA[4:8]],
}


@pytest.mark.parametrize("kind", SAME_ON_ALL)
def test_batches_that_are_the_same_in_every_process_are_global_ones(kind: str):
    assert gives_all_ranks_the_same(SAME_ON_ALL[kind](), RANKS)


@pytest.mark.parametrize("kind", PERHAPS_OWN)
def test_data_that_may_differ_by_rank_is_a_ranks_own(kind: str):
    assert not gives_all_ranks_the_same(PERHAPS_OWN[kind](), RANKS)


def test_a_model_of_another_library_is_refused_without_the_advice_to_wrap_it():
    def body(rank: int) -> str:
        with pytest.raises(ConfigurationError) as refused:
            check_shared("Trainer", (lambda weights, inputs: inputs, {"kernel": 1.0}))
        return str(refused.value)

    for ended in in_processes(body):
        assert ended.error == ""
        assert ended.value == (
            "Trainer(model=tuple): each of world_size=2 processes would train a copy of its own, since their gradients "
            "are averaged for torch modules only; start one process"
        )
