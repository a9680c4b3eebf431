"""Batches and the random numbers drawn for them depend on the seed, the pass and the position, not on the number of
workers; all ranks together read the data once; what cannot be keyed keeps its loader.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

from pulsetrain.engine.data import rng
from pulsetrain.engine.data.keyed_loader import KeyedLoader, KeyedOrder
from pulsetrain.engine.data.loaders import can_be_keyed, draws_nothing, length_of
from tests.support.datasets import Augmenting, Reading, flat, values


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_random_numbers_drawn_while_reading_do_not_depend_on_the_workers(persistent: bool):
    def drawn(workers: int) -> list[Any]:
        options = {"persistent_workers": persistent} if workers else {}
        loader = DataLoader(Augmenting(), batch_size=4, shuffle=True, num_workers=workers, **options)
        keyed = KeyedLoader(loader, 5)
        return [values(keyed.begin(1)), values(keyed.begin(2)), values(keyed.begin(2, 12))]

    first, second, rest = drawn(0)
    assert drawn(1) == drawn(2) == [first, second, rest]
    assert second[3:] == rest
    numbers = [number for batch in first + second for sample in batch for number in sample[1:]]
    assert len(set(numbers)) == len(numbers)  # each batch draws numbers of its own


def test_the_models_and_the_datas_random_numbers_are_separate():
    loader = DataLoader(Augmenting(), batch_size=4, shuffle=True)

    def run(draw: bool) -> tuple[list[Any], list[float]]:
        rng.seed_everything(1)
        batches, mine = [], []
        for batch in KeyedLoader(loader, 5).begin(1):
            batches.append(batch.tolist())
            if draw:
                mine += [random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item()]
        return batches, mine

    rng.seed_everything(1)
    undisturbed: list[float] = []
    for _ in range(6):
        undisturbed += [random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item()]
    with_draws, mine = run(draw=True)
    without, _ = run(draw=False)
    assert with_draws == without
    assert mine == undisturbed


def test_a_failing_dataset_leaves_the_generators_as_they_were():
    class Broken(Augmenting):
        def __getitem__(self, index: int) -> torch.Tensor:
            random.random()
            raise ZeroDivisionError

    before = random.getstate()
    with pytest.raises(ZeroDivisionError):
        next(KeyedLoader(DataLoader(Broken(), batch_size=4), 5).begin(1))
    assert random.getstate() == before


def noisy(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items) + torch.rand(1)


def test_random_numbers_drawn_while_collating_are_keyed_too():
    def drawn(workers: int) -> list[Any]:
        loader = DataLoader(Reading(12), batch_size=4, collate_fn=noisy, num_workers=workers)
        return values(KeyedLoader(loader, 5).begin(1))

    assert drawn(0) == drawn(2)
    assert drawn(0)[0] != [0, 1, 2, 3]


def test_a_dataset_that_reads_several_at_once_is_asked_to():
    class Several(Reading):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return [torch.tensor(index * 10) for index in indices]

    assert values(KeyedLoader(DataLoader(Several(4), batch_size=2), 0).begin(1)) == [[0, 10], [20, 30]]


def test_samples_without_batches_are_keyed_one_by_one():
    keyed = KeyedLoader(DataLoader(Augmenting(6), batch_size=None, shuffle=True), 3)
    whole = values(keyed.begin(1))
    assert sorted(sample[0] for sample in whole) == list(range(6))
    assert values(keyed.begin(1, 4)) == whole[4:]


# -------------------------------------------------------------------------------------------------- ranks


def rank_order(size: int, ranks: int, rank: int, batch_size: int, position: int = 0, **options: Any) -> list[list[int]]:
    dataset = range(size)
    sampler: Any = DistributedSampler(dataset, num_replicas=ranks, rank=rank, **options)  # type: ignore[arg-type]
    order = KeyedOrder(DataLoader(dataset, batch_size=batch_size, sampler=sampler), 4)  # type: ignore[arg-type]
    order.begin(2, position)
    return list(order)


def own_batches(size: int, ranks: int, rank: int, batch_size: int, position: int = 0) -> list[list[int]]:
    """Without those that another rank counts."""
    sampler: Any = DistributedSampler(range(size), num_replicas=ranks, rank=rank)  # type: ignore[arg-type]
    order = KeyedOrder(DataLoader(range(size), batch_size=batch_size, sampler=sampler), 4)  # type: ignore[arg-type]
    order.begin(2, position)
    return [batch[: order.share(position + n * order.step)[0]] for n, batch in enumerate(order)]


def test_the_samples_of_all_ranks_are_the_data_once():
    for size, ranks in ((24, 2), (25, 3), (31, 4), (5, 4)):
        seen = Counter(i for rank in range(ranks) for batch in own_batches(size, ranks, rank, 2) for i in batch)
        assert seen == Counter(range(size))


DROPS = pytest.mark.parametrize("drops", [(), ("loader",), ("sampler",), ("loader", "sampler")])


def orders_of(ranks: int, size: int, drops: tuple[str, ...], shuffle: bool) -> list[tuple[KeyedOrder, DataLoader[Any]]]:
    found = []
    for rank in range(ranks):
        data: Any = range(size)
        left_out = "sampler" in drops
        sampler: Any = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=shuffle, drop_last=left_out)
        loader = DataLoader(data, 4, sampler=sampler, drop_last="loader" in drops)
        found.append((KeyedOrder(loader, 4), loader))
    return found


@DROPS
@pytest.mark.parametrize("shuffle", [True, False])
def test_all_ranks_make_as_many_batches_as_their_loaders_have(drops: tuple[str, ...], shuffle: bool):
    for size in range(8, 35):
        made = {
            (len(list(order)), len(order), length_of(loader)) for order, loader in orders_of(2, size, drops, shuffle)
        }
        assert len(made) == 1, "each rank makes the same number of steps"
        assert len(set(made.pop())) == 1


@DROPS
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_counts_once_and_as_much_as_the_others_of_its_global_batch(drops: tuple[str, ...], shuffle: bool):
    ranks = 2
    for size in range(8, 35):
        orders = [order for order, _ in orders_of(ranks, size, drops, shuffle)]
        seen, position = Counter[int](), 0
        for batches in zip(*orders, strict=True):
            shares = [order.share(position) for order in orders]
            own = [batch[:count] for batch, (count, _) in zip(batches, shares, strict=True)]
            seen += Counter(flat(own))
            # the mean over the global batch, from the ranks' means
            weights = [count / even for count, even in shares]
            means = [sum(batch) / len(batch) * weight for batch, weight in zip(batches, weights, strict=True)]
            assert sum(means) / ranks == pytest.approx(sum(flat(own)) / len(flat(own)))
            position += orders[0].step
        assert max(seen.values()) == 1
        if not drops:
            assert seen == Counter(range(size))
        assert size - seen.total() < orders[0].step


def test_global_batches_do_not_depend_on_the_number_of_ranks():
    def global_batches(ranks: int, batch_size: int) -> list[set[int]]:
        shares = [rank_order(24, ranks, rank, batch_size) for rank in range(ranks)]
        return [set(flat(parts)) for parts in zip(*shares, strict=True)]

    assert global_batches(1, 8) == global_batches(2, 4) == global_batches(4, 2)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (4, 2), (3, 4)])
def test_another_number_of_ranks_in_mid_pass_neither_repeats_nor_loses_a_sample(before: int, after: int):
    size, batch_size, taken = 97, 2, 5
    seen = Counter(
        i for rank in range(before) for batch in rank_order(size, before, rank, batch_size)[:taken] for i in batch
    )
    position = taken * batch_size * before
    seen += Counter(
        i for rank in range(after) for batch in own_batches(size, after, rank, batch_size, position) for i in batch
    )
    assert seen == Counter(range(size))


def test_ranks_draw_different_numbers():
    def drawn(rank: int) -> list[float]:
        sampler = DistributedSampler(Augmenting(), num_replicas=2, rank=rank)  # type: ignore[arg-type]
        return [s[1] for b in values(KeyedLoader(DataLoader(Augmenting(), 4, sampler=sampler), 4).begin(1)) for s in b]

    assert not set(drawn(0)) & set(drawn(1))


def test_a_distributed_sampler_may_drop_the_rest_and_leave_the_order():
    assert [rank_order(7, 2, rank, 2, shuffle=False, drop_last=True) for rank in (0, 1)] == [
        [[0, 2], [4]],
        [[1, 3], [5]],
    ]


# ------------------------------------------------------------------------------------ what can be replaced


def test_loaders_are_replaced_by_keyed_ones_only_where_possible():
    class Mine(DataLoader[Any]): ...

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    assert can_be_keyed(DataLoader(Reading(3)))
    assert not can_be_keyed(Mine(Reading(3)))
    assert not can_be_keyed(DataLoader(Stream()))
    assert not can_be_keyed([1, 2])


def test_datasets_known_to_draw_no_random_numbers_are_recognised():
    tensors = TensorDataset(torch.arange(4))

    class Declared(Reading):
        draws_nothing = True

    plain = (tensors, Subset(tensors, [1]), ConcatDataset([tensors, Subset(tensors, [0])]), [1, 2], Declared(3))
    assert all(draws_nothing(DataLoader(dataset)) for dataset in plain)  # type: ignore[arg-type]
    assert not draws_nothing(DataLoader(Reading(3)))
    assert not draws_nothing(DataLoader(Subset(Reading(3), [0])))
    assert not draws_nothing(DataLoader(tensors, collate_fn=noisy))


def set_mark(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    info.dataset.mark = info.dataset.size * 100  # type: ignore[union-attr]


class Marked(Augmenting):
    mark = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.mark)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_init_fn_sees_and_sets_the_datasets_attributes(context: str):
    loader = DataLoader(
        Marked(3), num_workers=1, worker_init_fn=set_mark, multiprocessing_context=context, collate_fn=torch.stack
    )
    assert values(KeyedLoader(loader, 0).begin(1)) == [[300], [300], [300]]


def test_replacing_a_loader_leaves_the_original_and_the_global_generator_alone():
    loader = DataLoader(Reading(8), batch_size=2, shuffle=True, num_workers=2)
    before = torch.get_rng_state()
    keyed = KeyedLoader(loader, 0)
    list(keyed.begin(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert loader.generator is None
    assert loader.sampler.generator is None  # type: ignore[attr-defined]
