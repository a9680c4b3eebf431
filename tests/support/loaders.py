"""Data loaders of every kind, and runs over them that are interrupted and resumed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from pulsetrain import Trainer
from pulsetrain.engine import Every
from pulsetrain.handlers import Checkpointer
from tests.support.models import loader, pairs, regression_model, trainer
from tests.support.runs import cut_after

ROWS, BATCH_SIZE = 40, 4  # 10 batches a pass
CONFIG = {"max_epochs": 3, "optimizer": "adamw", "seed": 7}
Pair = tuple[Tensor, Tensor]
INPUTS, TARGETS = pairs(ROWS).tensors


def noise() -> float:
    """Noise from all three generators that a dataset may use."""
    return 0.1 * (random.random() + float(np.random.rand()) + torch.rand(()).item())


class Augmented(Dataset[Pair]):
    """Draws random numbers for each sample, and records which were read in this process."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Pair:
        self.read.append(index)
        return INPUTS[index] + noise(), TARGETS[index]


class Subclass(DataLoader[Any]):
    """A subclass may do anything, so its loader is not rebuilt."""


class Stream(IterableDataset[Pair]):
    """Each worker yields its share in random order."""

    def __iter__(self) -> Iterator[Pair]:
        worker = get_worker_info()
        share = list(range(ROWS))[worker.id :: worker.num_workers] if worker else list(range(ROWS))
        random.shuffle(share)
        for index in share:
            yield INPUTS[index] + noise(), TARGETS[index]


class Generating:
    """Not a DataLoader: draws its batches."""

    def __iter__(self) -> Iterator[Pair]:
        for _ in range(ROWS // BATCH_SIZE):
            inputs = torch.randn(BATCH_SIZE, 4) + noise()
            yield inputs, inputs.sum(1, keepdim=True)


class Chunked:
    """Draws an order for several batches at a time, and nothing in between."""

    def __iter__(self) -> Iterator[Pair]:
        for start in (0, ROWS // 2):
            order = start + np.random.permutation(ROWS // 2)
            for chunk in np.split(order, ROWS // 2 // BATCH_SIZE):
                yield INPUTS[chunk], TARGETS[chunk]


class Late:
    """Draws an order for the last of its 20 batches, and nothing before that."""

    def __iter__(self) -> Iterator[Pair]:
        yield from zip(INPUTS[:24].split(2), TARGETS[:24].split(2), strict=True)
        for rows in (24 + torch.randperm(16)).split(2):
            yield INPUTS[rows], TARGETS[rows]


class Stateful:
    """Saves its position and its order; a sample's noise is not part of its state."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.position = 0
        self.read = 0

    def __iter__(self) -> Iterator[Pair]:
        if self.position == 0:
            self.order = torch.randperm(ROWS).tolist()
        while self.position < ROWS:
            chunk = self.order[self.position : self.position + BATCH_SIZE]
            self.position += BATCH_SIZE
            self.read += 1
            yield INPUTS[chunk] + noise(), TARGETS[chunk]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = list(state["order"]), state["position"]


class Shuffling(Sampler[int]):
    """Shuffles with Python's generator, without its own."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(ROWS))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return ROWS


def augmented(workers: int = 0, kind: Callable[..., Any] = DataLoader, **options: Any) -> Any:
    return kind(Augmented(), **{"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": workers, **options})


def stream(workers: int = 0, **options: Any) -> Any:
    return DataLoader(Stream(), batch_size=BATCH_SIZE, num_workers=workers, **options)


def torchdata_loader(workers: int = 0, dataset: Any = None, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its constructor uses what torch has deprecated
        return module.StatefulDataLoader(
            dataset or pairs(ROWS),
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=workers,
            **{"generator": torch.Generator().manual_seed(3), **options},
        )


def list_of_batches() -> list[Pair]:
    return list(zip(INPUTS.split(BATCH_SIZE), TARGETS.split(BATCH_SIZE), strict=True))


def own_batches() -> Any:
    batches = BatchSampler(Shuffling(), BATCH_SIZE, drop_last=False)
    return augmented(batch_sampler=batches, batch_size=1, shuffle=None)


LOADERS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: loader(ROWS, BATCH_SIZE),
    "draws": augmented,
    "draws, 1 worker": lambda: augmented(1),
    "draws, 2 workers": lambda: augmented(2),
    "draws, 2 persistent workers": lambda: augmented(2, persistent_workers=True),
    "drop_last": lambda: augmented(batch_size=3, drop_last=True),
    "a smaller last batch": lambda: augmented(batch_size=6),
    "batch_sampler": own_batches,
    "sampler with weights": lambda: augmented(
        sampler=WeightedRandomSampler(torch.linspace(0.1, 1.0, ROWS), ROWS), shuffle=None
    ),
    "sampler with replacement": lambda: augmented(
        sampler=RandomSampler(range(ROWS), replacement=True, num_samples=ROWS), shuffle=None
    ),
    "sampler of one's own": lambda: augmented(sampler=Shuffling(), shuffle=None),
    "subclass": lambda: augmented(kind=Subclass),
    "subclass, 2 workers": lambda: augmented(2, Subclass),
    "subclass, 2 persistent workers": lambda: augmented(2, Subclass, persistent_workers=True),
    "subclass, 2 workers, sampler of one's own": lambda: augmented(2, Subclass, sampler=Shuffling(), shuffle=None),
    "stream": stream,
    "stream, 2 workers": lambda: stream(2),
    "stream, 2 persistent workers": lambda: stream(2, persistent_workers=True),
    "generating": Generating,
    "draws now and then": Chunked,
    "draws late": Late,
    "state of its own": Stateful,
    "torchdata's": torchdata_loader,
    "torchdata's, 2 workers": lambda: torchdata_loader(2),
    "torchdata's, draws": lambda: torchdata_loader(0, Augmented()),
    "torchdata's, draws, 2 workers": lambda: torchdata_loader(2, Augmented()),
    "list": list_of_batches,
}


def make(data: Any, folder: Path, every: Every | None = None) -> Trainer:
    """As in a new process: the generators have other states each time."""
    checkpointer = Checkpointer(folder, every=every or Every(epochs=100), at_end=False)
    run = trainer(CONFIG, model=regression_model(dropout=0.3), train_loader=data, handlers=[checkpointer])
    random.seed()
    np.random.seed()
    torch.seed()
    return run


def end_workers(run: Trainer) -> None:
    """Now, not during garbage collection, where torch would wait 5 s for each persistent worker."""
    if isinstance(run.train_loader, DataLoader):
        run.train_loader._iterator = None


def outcome(run: Trainer) -> dict[str, Any]:
    return {
        "iterations": run.state.iteration,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "history": run.history.get_history(),
    }


def flat(state: Any, path: str = "") -> dict[str, Any]:
    """Each leaf by its path; tensors by their bytes."""
    if isinstance(state, dict | list | tuple):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {name: leaf for key, value in pairs for name, leaf in flat(value, f"{path}/{key}").items()}
    return {path: state.numpy().tobytes() if isinstance(state, Tensor) else state}


def cut(data: Any, folder: Path, iteration: int) -> None:
    run = make(data, folder, Every(iterations=iteration))
    cut_after(run, iteration)
    end_workers(run)


def resumed(data: Any, folder: Path) -> dict[str, Any]:
    run = make(data, folder)
    run.train(resume="latest")
    end_workers(run)
    return flat(outcome(run))
