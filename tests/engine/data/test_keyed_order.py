"""The order of the data depends only on the seed and the pass, for samplers of every kind, and a position is reached
without reading what lies before it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, TensorDataset, WeightedRandomSampler

from pulsetrain.engine.data.keyed_loader import KeyedLoader, KeyedOrder
from pulsetrain.engine.data.loaders import order_seed
from tests.support.datasets import Reading, flat, values


def test_the_order_depends_only_on_the_seed_and_the_pass():
    def order(seed: int, number: int, workers: int = 0) -> list[Any]:
        torch.manual_seed(random.randrange(1 << 30))
        loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=3, shuffle=True, num_workers=workers)
        return [batch[0].tolist() for batch in KeyedLoader(loader, seed).begin(number)]

    first = order(7, 1)
    assert sorted(flat(first)) == list(range(20))
    assert [len(batch) for batch in first] == [3] * 6 + [2]
    assert order(7, 1) == order(7, 1, workers=2) == first
    assert order(7, 2) != first
    assert order(8, 1) != first


def test_a_position_is_reached_without_reading_what_lies_before_it():
    dataset = Reading(1000)
    keyed = KeyedLoader(DataLoader(dataset, batch_size=10, shuffle=True), 0)
    whole = values(keyed.begin(1))
    dataset.read.clear()
    rest = keyed.begin(1, 900)
    assert next(rest).tolist() == whole[90]
    assert dataset.read == whole[90]
    assert values(rest) == whole[91:]
    assert values(keyed.begin(1, 1000)) == []


def test_a_million_samples_are_skipped_at_once():
    order = KeyedOrder(DataLoader(range(1_000_000), batch_size=32, shuffle=True), 0)  # type: ignore[arg-type]
    order.begin(1, 32 * 31_249)
    assert len(next(iter(order))) == 32


def test_a_sequential_loader_keeps_its_order():
    keyed = KeyedLoader(DataLoader(Reading(7), batch_size=2), 0)
    assert values(keyed.begin(3)) == [[0, 1], [2, 3], [4, 5], [6]]
    assert values(keyed.begin(3, 4)) == [[4, 5], [6]]
    assert values(KeyedLoader(DataLoader(Reading(7), batch_size=2, drop_last=True), 0).begin(1)) == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


def test_the_seed_of_an_order_is_that_of_the_samplers_generator_then_the_loaders_then_the_runs():
    mine, samplers = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    sampler = RandomSampler(range(4), generator=samplers)
    assert order_seed(DataLoader(range(4), sampler=sampler, generator=mine), 3) == 2
    assert order_seed(DataLoader(range(4), batch_sampler=BatchSampler(sampler, 2, False)), 3) == 2
    assert order_seed(DataLoader(range(4), generator=mine), 3) == 1
    assert order_seed(DataLoader(range(4), shuffle=True), 3) == order_seed([1, 2], 3) == 3


# ---------------------------------------------------------------------------------- samplers of other kinds


def test_sampling_with_weights_and_with_replacement_is_keyed():
    for sampler in (
        WeightedRandomSampler([0.1, 0.2, 0.7], 40),
        RandomSampler(range(3), replacement=True, num_samples=40),
        torch.utils.data.SubsetRandomSampler(list(range(3)) * 13 + [0]),
        RandomSampler(range(3), generator=torch.Generator()),
    ):

        def order(number: int, position: int = 0, sampler: Any = sampler) -> list[Any]:
            torch.rand(random.randrange(1, 9))
            return values(KeyedLoader(DataLoader(Reading(3), batch_size=4, sampler=sampler), 2).begin(number, position))

        before = torch.get_rng_state()
        whole = order(1)
        assert order(1) == whole
        assert order(1, 8) == whole[2:]
        if len(whole) > 1:
            assert order(2) != whole
        assert not torch.equal(torch.get_rng_state(), before)  # by the line above that draws


class Shouting(Sampler[int]):
    """Draws from the process's generators while it is iterated, as samplers of users do."""

    def __iter__(self) -> Any:
        for _ in range(12):
            yield random.randrange(100) + int(torch.randint(100, ()))

    def __len__(self) -> int:
        return 12


def test_a_custom_sampler_is_keyed_whatever_is_drawn_meanwhile():
    def order(draw: bool, position: int = 0) -> list[Any]:
        loader = DataLoader(Reading(200), batch_size=3, sampler=Shouting())
        found = []
        for batch in KeyedLoader(loader, 2).begin(1, position):
            found.append(batch.tolist())
            if draw:
                random.random(), torch.rand(3)
        return found

    whole = order(draw=False)
    assert order(draw=True) == whole
    assert order(draw=True, position=6) == whole[2:]


class Buckets(Sampler[list[int]]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        for length in (1, 3, 2):
            yield [self.epoch * 10 + random.randrange(5) for _ in range(length)]

    def __len__(self) -> int:
        return 3


def test_a_custom_batch_samplers_batches_are_kept_and_counted_by_batch():
    keyed = KeyedLoader(DataLoader(Reading(50), batch_sampler=Buckets()), 2)
    whole = values(keyed.begin(3))
    assert [len(batch) for batch in whole] == [1, 3, 2]
    assert min(flat(whole)) >= 20
    assert values(keyed.begin(3, 1)) == whole[1:]
    assert keyed.order.step == 1


def test_a_plain_batch_sampler_made_by_hand_is_recognised():
    loader = DataLoader(Reading(9), batch_sampler=BatchSampler(RandomSampler(range(9)), 4, drop_last=True))
    whole = values(KeyedLoader(loader, 1).begin(1))
    assert [len(batch) for batch in whole] == [4, 4]
    assert values(KeyedLoader(loader, 1).begin(1, 4)) == whole[1:]


class Listed(Sampler):
    """Its order is an attribute, which is read when it is iterated."""

    def __init__(self, order):
        self.order = order

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_sampler_that_is_changed_before_the_first_batch_gives_the_changed_order(batch_size):
    sampler = Listed([0, 1, 2, 3])
    loader = DataLoader(range(4), batch_size=batch_size, sampler=sampler)
    batches = KeyedLoader(loader, seed=0).begin(1)
    sampler.order = [3, 2, 1, 0]
    found = [batch if batch_size is None else batch.tolist() for batch in batches]
    assert found == ([3, 2, 1, 0] if batch_size is None else [[3, 2], [1, 0]])


class Drawing(Sampler):
    """Draws from a generator of its own, of numpy or torch."""

    def __init__(self, count: int, generator: Any) -> None:
        self.count, self.generator = count, generator

    def __iter__(self) -> Any:
        for _ in range(self.count):
            if isinstance(self.generator, torch.Generator):
                yield int(torch.randint(self.count, (), generator=self.generator))
            else:
                yield int(self.generator.integers(self.count))

    def __len__(self) -> int:
        return self.count


class NeverCopied(Reading):
    def __deepcopy__(self, memo: object) -> Any:
        raise AssertionError("a dataset may be large")


@pytest.mark.parametrize("kind", ["random", "torch", "numpy", "batches"])
def test_asking_for_the_rows_of_a_batch_changes_nothing_in_the_pass_in_progress(kind: str):
    def make() -> KeyedLoader:
        dataset = NeverCopied(200)
        own = np.random.default_rng(3) if kind == "numpy" else torch.Generator().manual_seed(3)
        sampler = Drawing(200, own)
        if kind == "random":
            sampler = RandomSampler(dataset, replacement=True, generator=own)
        if kind == "batches":
            batches = type("Own", (BatchSampler,), {})(sampler, 4, drop_last=False)
            return KeyedLoader(DataLoader(dataset, batch_sampler=batches), 0)
        return KeyedLoader(DataLoader(dataset, batch_size=4, sampler=sampler), 0)

    expected = values(make().begin(2))
    keyed = make()
    seen = []
    for number, batch in enumerate(keyed.begin(2)):
        seen.append(batch.tolist())
        if number == 20:
            rows = keyed.order.rows(2, 3 * keyed.order.step)
            if kind != "numpy":  # whose generator is nowhere seeded
                assert rows == expected[3]
                assert keyed.order.rows(1, 0) != expected[0]
    assert seen == expected


def test_the_rows_of_a_sampler_that_cannot_be_copied_are_not_known():
    class Uncopied(Drawing):
        def __deepcopy__(self, memo: object) -> Any:
            raise TypeError("cannot be copied")

    keyed = KeyedLoader(DataLoader(Reading(9), batch_size=2, sampler=Uncopied(9, torch.Generator())), 0)
    assert keyed.order.rows(1, 0) == []
