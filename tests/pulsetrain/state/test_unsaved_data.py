"""A run warns at its start about data that a checkpoint cannot capture: read once, or with its own generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, Subset

from pulsetrain import Trainer
from pulsetrain.engine import Every
from pulsetrain.handlers import Checkpointer
from tests.support.models import loader, pairs, trainer
from tests.support.runs import cut_after, saving_run, warnings_of


def iterator_warnings(data: Any, folder: Path) -> list[str]:
    checkpointer = Checkpointer(folder, every=Every(epochs=9), at_end=False)
    run = trainer({"max_iterations": 3}, train_loader=data, handlers=[checkpointer])
    return [each["loader"] for each in warnings_of(run) if "can be read only once" in each["event"]]


def test_an_iterator_is_reported_and_data_that_can_be_read_again_is_not(tmp_path: Path):
    assert iterator_warnings((batch for batch in loader()), tmp_path) == ["generator"]
    for data in (loader(), list(loader()), loader(num_workers=1)):
        assert iterator_warnings(data, tmp_path) == []


def test_an_iterator_that_keeps_its_state_is_not_reported(tmp_path: Path):
    class Keeping:
        def __init__(self) -> None:
            self.batches = iter(loader())

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            return next(self.batches)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Nothing to do."""

    assert iterator_warnings(Keeping(), tmp_path) == []


# ------------------------------------------------------------------------------- generators of the data's own


PAIRS = pairs()


class Noisy(Dataset[Any]):
    """Has the given attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return PAIRS[index]


class Shuffling(Sampler[int]):
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


class Jitter:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, batch: Any) -> Any:
        return torch.utils.data.default_collate(batch)


class Own(DataLoader[Any]):
    """A subclass, which is not rebuilt."""


def generator_warnings(data: Any, folder: Path) -> list[str]:
    run = trainer(
        {"max_iterations": 2}, train_loader=data, handlers=[Checkpointer(folder, every=Every(epochs=9), at_end=False)]
    )
    return [
        path
        for each in warnings_of(run)
        if "random generators of its own" in each["event"]
        for path in each["generators"]
    ]


def collate_with_default(batch: Any, generator: Any = np.random.default_rng(1)) -> Any:  # noqa: B008
    return torch.utils.data.default_collate(batch)


@pytest.mark.parametrize(
    "generator", [np.random.default_rng(0), np.random.RandomState(0), random.Random(0), torch.Generator()]
)
@pytest.mark.parametrize("kind", [DataLoader, Own])
def test_a_generator_in_the_data_is_named_wherever_it_is(kind: Any, generator: Any, tmp_path: Path):
    def closing(batch: Any) -> Any:
        return torch.utils.data.default_collate(batch) if generator else None

    found = {
        "dataset.rng": kind(Noisy(rng=generator), 4),
        "dataset.dataset.rng": kind(Subset(Noisy(rng=generator), range(40)), 4),
        "dataset.transforms[1].generator": kind(Noisy(transforms=[None, Jitter(generator)]), 4),
        "dataset.by_name['a'].generator": kind(Noisy(by_name={"a": Jitter(generator)}), 4),
        "collate_fn.generator": kind(Noisy(), 4, collate_fn=Jitter(generator)),
    }
    for path, data in found.items():
        assert generator_warnings(data, tmp_path) == [path]
    assert generator_warnings(kind(Noisy(), 4, collate_fn=closing), tmp_path) == ["collate_fn.generator"]
    assert generator_warnings(kind(Noisy(), 4, collate_fn=collate_with_default), tmp_path) == ["collate_fn.generator"]
    if not isinstance(generator, torch.Generator):
        assert generator_warnings(kind(Noisy(), 4, sampler=Shuffling(generator)), tmp_path) == ["sampler.generator"]
        batches = BatchSampler(Shuffling(generator), 4, False)
        assert generator_warnings(kind(Noisy(), batch_sampler=batches), tmp_path) == ["batch_sampler.sampler.generator"]


def test_a_custom_loader_that_draws_from_its_own_generator_is_named(tmp_path: Path):
    class Drawing:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)

        def __iter__(self) -> Iterator[Any]:
            return iter(loader())

    assert generator_warnings(Drawing(), tmp_path) == ["loader.rng"]


def test_generators_that_each_pass_seeds_or_a_checkpoint_holds_are_not_named(tmp_path: Path):
    mine = torch.Generator()
    for kind in (DataLoader, Own):
        sampler = RandomSampler(range(40), generator=mine)
        for data in (
            kind(Noisy(), 4, shuffle=True, generator=mine),
            kind(Noisy(), 4, sampler=sampler),
            kind(Noisy(), batch_sampler=BatchSampler(sampler, 4, False)),
            kind(Noisy(draw=random.random, module=random, torchs=torch.default_generator), 4),
            kind(Noisy(rng=random.Random(), draws_nothing=True), 4),
        ):
            assert generator_warnings(data, tmp_path) == []


def test_a_generator_in_a_validation_set_is_named_unless_a_checkpoint_holds_it(tmp_path: Path):
    def found(data: Any, train: Any = None) -> list[tuple[str, list[str]]]:
        saver = Checkpointer(tmp_path, every=Every(epochs=9), at_end=False)
        run = trainer({"max_iterations": 2}, train_loader=train, val_loader={"test": data}, handlers=[saver])
        logs = warnings_of(run)
        return [(each["event"], each["generators"]) for each in logs if "generators of its own" in each["event"]]

    rows = Noisy(rng=np.random.default_rng(0))
    ((event, generators),) = found(DataLoader(rows, 4))
    assert event.startswith("the validation set 'test' holds random generators")
    assert generators == ["dataset.rng"]
    ((event, _),) = found(DataLoader(Subset(rows, range(8)), 4), DataLoader(rows, 4))
    assert event.startswith("the training data")  # which has named it
    assert found(DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator())) == []


@pytest.mark.slow
@pytest.mark.parametrize("iteration", [4, 13])
def test_a_generator_in_a_batch_samplers_sampler_is_seeded_for_each_pass(iteration: int, tmp_path: Path):
    def run(folder: str, seed: int) -> Trainer:
        sampler = RandomSampler(range(40), generator=torch.Generator().manual_seed(seed))
        data = Own(Noisy(), batch_sampler=BatchSampler(sampler, 4, False))
        return saving_run(tmp_path / folder, epochs=2, every=Every(iterations=1), train_loader=data)

    whole = run("whole", 1)
    whole.train()
    cut_after(run("cut", 1), iteration)
    again = run("cut", 3)  # the order is the checkpoint's
    again.train(resume="latest")
    assert all(torch.equal(each, again.model.state_dict()[name]) for name, each in whole.model.state_dict().items())
