"""Data as a function of (seed, pass, position): which samples make a batch, and the random numbers of reading them.

`KeyedLoader` replaces a DataLoader over a map-style dataset. Its order depends on (seed, pass) alone, not on the number
of workers or ranks. A run can resume at any position without reading the batches before it. Python's, numpy's and
torch's generators are seeded for each batch, so augmentations depend neither on the worker that draws them nor on the
model, and the model's random numbers do not depend on the augmentations.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from pulsetrain.engine.data import rng
from pulsetrain.engine.data.loaders import draws_nothing, length_of, seed_generator
from pulsetrain.engine.data.workers import user_init_fn, workers_begin

__all__ = ["KeyedLoader", "KeyedOrder"]

T = TypeVar("T")
Collate = Callable[[Any], Any]
"""A `collate_fn`: samples to a batch, both as the user's dataset makes them."""
Look = Callable[[Mapping[str, object]], object]
"""Looks at the parts of a loader by their names."""


class KeyedBatch(NamedTuple):
    """What a sampler asks of the dataset: the sample indices, and the seed for the random numbers of reading them."""

    indices: Any  # one index or a list of them, of whatever type the sampler draws
    seed: int


class KeyedOrder:
    """A batch sampler whose order is a function of (seed, pass) and that can start at any position.

    There is one order of samples for all ranks. Each global batch of `batch_size * ranks` samples is divided among the
    ranks, so resuming with a different number of ranks neither repeats nor loses a sample. A last, smaller batch is
    divided too, unless the loader drops it. A rank for which no sample is left gets one of another rank's, since all
    ranks make the same number of steps; `share` says how much each batch counts. A DistributedSampler that drops the
    rest leaves out the samples that cannot be shared out evenly.

    A position counts samples of that order; with the user's own batch sampler, which runs unchanged, it counts batches.

    >>> order = KeyedOrder(DataLoader(range(6), batch_size=2, shuffle=True), seed=0)
    >>> order.rows(1, 0), order.rows(1, 4), order.rows(2, 0)
    ([3, 5], [0, 1], [2, 3])
    >>> order.begin(1, position=4)
    >>> list(order) == [order.rows(1, 4)]
    True

    Args:
        loader: the loader whose sampler is replaced. Sequential, random and distributed samplers are reimplemented;
            any other is iterated with seeded generators, and its `set_epoch` is called before each pass.
        seed: the seed of the run.
        ranks: this rank and their number, if they share out the loader's batches, which are the global ones. A
            DistributedSampler shares out itself: the loader's batches are then those of one rank.
    """

    number: int
    position: int

    def __init__(self, loader: DataLoader[Any], seed: int, ranks: tuple[int, int] | None = None) -> None:
        self.seed = seed
        self.batched: bool = loader.batch_size is not None or loader.batch_sampler is not None
        sampler: Any = loader.sampler  # samplers share no type beyond Iterable
        batches: Any = loader.batch_sampler
        self._own_batches = batches is not None and type(batches) is not BatchSampler  # the user's own
        self._batch_size, self._drop_last = 1, False
        if self._own_batches:
            sampler = batches
        elif batches is not None:  # a BatchSampler made by the user may have a different sampler than the loader
            sampler, self._batch_size, self._drop_last = batches.sampler, batches.batch_size, batches.drop_last
        self._sampler = sampler
        self._even = False
        self._rank, self._ranks = ranks or (0, 1)
        self._batch_size //= self._ranks
        self._shuffle: bool | None = None  # None: iterate the sampler itself
        if type(sampler) is SequentialSampler:
            self._shuffle = False
        elif (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler.num_samples == len(sampler.data_source)  # each sample once
        ):
            self._shuffle = True
        elif type(sampler) is DistributedSampler:
            self._shuffle, self._ranks, self._rank = sampler.shuffle, sampler.num_replicas, sampler.rank
            self._even = sampler.drop_last
        self._of_loader = loader.dataset
        self._dataset: Any = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
        self._length = length_of(loader)
        self._keyed = not draws_nothing(loader)
        self.begin(1)

    @property
    def ranks(self) -> int:
        """How many ranks share out this order."""
        return self._ranks

    @property
    def step(self) -> int:
        """How far one batch moves the position."""
        return 1 if self._own_batches else self._batch_size * self._ranks

    @property
    def samples(self) -> int | None:
        """Samples in a pass over all ranks; None if unknown, or if the position counts batches."""
        if self._own_batches:
            return None
        samples = length_of(self._sampler if self._shuffle is None else self._dataset)
        return samples - samples % self._ranks if self._even and samples is not None else samples

    def batches(self, samples: int) -> int:
        """The number of batches that this many samples over all ranks make."""
        return samples // self.step if self._drop_last else -(-samples // self.step)

    def share(self, position: int) -> tuple[int, float]:
        """How many samples of the global batch at a position are this rank's, and how many an even share would be.

        A batch's mean loss, times the first over the second, averages over all ranks to the mean over the global batch.

        >>> sampler = DistributedSampler(range(17), num_replicas=2, rank=1)
        >>> order = KeyedOrder(DataLoader(range(17), batch_size=4, sampler=sampler), seed=0)
        >>> order.share(0), order.share(16)
        ((4, 4.0), (0, 0.5))
        """
        samples = self.samples
        left = self.step if samples is None else min(self.step, samples - position)
        return len(range(self._rank, left, self._ranks)), left / self._ranks

    def begin(self, number: int, position: int = 0, at_position: Callable[[], None] | None = None) -> None:
        """Sets the pass and the position at which the next iteration starts.

        With a function, the sampler is drawn from up to there now, and the function is called: what is set of the
        sampler and the dataset after this, before the first batch, holds.
        """
        self.number, self.position, self._drawn = number, position, None
        if at_position is not None:
            self._drawn = self._draw(number, position)
            at_position()

    def rows(self, number: int, position: int) -> list[Any]:
        """The sample indices of the batch at a position of a pass; empty after its end.

        It is also empty for a sampler of the user's that cannot be copied: the pass in progress draws from the sampler.
        """
        drawn = self._draw(number, position) if self._shuffle is not None else self._draw_from_copy(number, position)
        found: object = next(self._batches(drawn), [])
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def __iter__(self) -> Iterator[Any]:
        number, position = self.number, self.position
        drawn, self._drawn = self._drawn, None
        source = self._draw(number, position) if drawn is None else drawn
        if not self._keyed and not self.batched and self._ranks == 1:
            yield from source  # nothing is seeded or shared out: as little as possible between sampler and loader
            return
        for indices in self._batches(source):
            yield from self._reads(indices, number, position)
            position += self.step

    def _reads(self, indices: Any, number: int, position: int) -> Iterator[Any]:
        """What is read for the batch at a position of a pass: here its samples, at once."""
        yield self._keyed_batch(indices, number, position + self._rank)

    def _keyed_batch(self, indices: Any, *key: int) -> Any:
        return KeyedBatch(indices, rng.derive(self.seed, *key)) if self._keyed else indices

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("KeyedOrder: the loader has no length")
        return self._length

    def _draw(self, number: int, position: int) -> Iterator[Any]:
        """The samples from a position of a pass on; the batches, with the user's own batch sampler."""
        return self._draw_from(number, position) if self._own_batches else self._samples(number, position)

    def _batches(self, source: Iterator[Any]) -> Iterator[Any]:
        if self._own_batches:
            yield from source
            return
        while chunk := list(islice(source, self.step)):
            if self._drop_last and len(chunk) < self.step:
                return
            share = chunk[self._rank :: self._ranks] or chunk[:1]
            yield share if self.batched else share[0]

    def _samples(self, number: int, position: int) -> Iterator[int]:
        if self._shuffle is None:
            return self._draw_from(number, position)
        count = len(self._dataset)
        if not self._shuffle:
            return iter(range(count)[position : self.samples])
        generator = torch.Generator().manual_seed(rng.derive(self.seed, number))
        return iter(torch.randperm(count, generator=generator)[position : self.samples].tolist())

    def _draw_from(self, number: int, position: int, copied: Any = None) -> Iterator[Any]:
        """The sampler's own order from a position on, or that of its copy, drawn from a separate random stream."""
        draws = rng.Draws(rng.derive(self.seed, number))
        sampler, seed = (self._sampler, seed_generator) if copied is None else (copied, torch.Generator.manual_seed)
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(number - 1)
        for holder in (sampler, getattr(sampler, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                seed(generator, rng.derive(self.seed, number))
        drawn = draws.around(sampler)
        deque(islice(drawn, position), maxlen=0)
        return drawn

    def _draw_from_copy(self, number: int, position: int) -> Iterator[Any]:
        """The same order, from a copy of the sampler, which shares the datasets; nothing if it cannot be copied."""
        holders = (self._sampler, getattr(self._sampler, "sampler", None))
        held = [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]
        shared = [self._of_loader, self._dataset, *(each for each in held if isinstance(each, Dataset))]
        try:
            copied = deepcopy(self._sampler, {id(each): each for each in shared if each is not None})
        except Exception:  # of the user's code, such as a generator
            return iter(())
        return self._draw_from(number, position, copied)


class KeyedLoader:
    """The batches of a DataLoader in a keyed order; the module docstring says what that means.

    The given loader stays unchanged. This one starts its own workers, with the same settings.

    >>> loader = KeyedLoader(DataLoader(range(6), batch_size=2, shuffle=True), seed=0)
    >>> passed = [batch.tolist() for batch in loader.begin(1)]
    >>> [batch.tolist() for batch in loader.begin(1, position=4)] == passed[2:]
    True

    Args:
        loader: a loader that `can_be_keyed` accepts.
        seed: the seed of the run.
        look: called with the dataset and the `collate_fn`, by name, before each batch is read, in workers as well.
            It is not called for datasets that are known to draw nothing.
        ranks: as for `KeyedOrder`.
        order: by default a `KeyedOrder` for these ranks.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        look: Look | None = None,
        ranks: tuple[int, int] | None = None,
        order: KeyedOrder | None = None,
    ) -> None:
        self.order: KeyedOrder = order or KeyedOrder(loader, seed, ranks)
        dataset: Any = loader.dataset  # any object with __getitem__
        collate = loader.collate_fn
        if not draws_nothing(loader):
            dataset, collate = _KeyedDataset(loader.dataset, loader.collate_fn, look), _identity
        self._generator = torch.Generator()
        self._seed = seed
        options: dict[str, Any] = {"batch_sampler": self.order}
        if not self.order.batched:
            options = {"sampler": self.order, "batch_size": None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's loader has given the same warnings already
            self._loader: DataLoader[Any] = DataLoader(
                dataset,
                **options,
                num_workers=loader.num_workers,
                collate_fn=collate,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=user_init_fn(loader.worker_init_fn),
                multiprocessing_context=loader.multiprocessing_context,
                generator=self._generator,  # without one, making an iterator draws from the global generator
                prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
                persistent_workers=loader.persistent_workers,
                in_order=getattr(loader, "in_order", True),
            )
        # Keeps the loader alive until this object is gone. If one garbage collection took both, torch could no longer
        # reach persistent workers and would wait 5 s for each.
        weakref.finalize(self, _identity, self._loader).atexit = False

    def begin(self, number: int, position: int = 0, at_position: Callable[[], None] | None = None) -> Iterator[Any]:
        """The batches of a pass, starting at a position; see `KeyedOrder.begin`."""
        self._generator.manual_seed(rng.derive(self._seed, number))
        self.order.begin(number, position, at_position)
        with workers_begin(self._loader):
            return iter(self._loader)


class _KeyedDataset:
    """A dataset that reads and collates each batch with the batch's own seed.

    It forwards attributes to the wrapped dataset, since a `worker_init_fn` may read and set them.
    """

    def __init__(self, dataset: Dataset[object], collate: Collate, look: Look | None) -> None:
        self.__dict__["_keyed"] = (dataset, collate, look)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_keyed" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._keyed[0], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._keyed[0], name, value)

    def __reduce__(self) -> tuple[type[_KeyedDataset], tuple[Dataset[Any], Collate, Look | None]]:
        return _KeyedDataset, self._keyed

    def __len__(self) -> int:
        return len(self._keyed[0])

    def __getitem__(self, batch: KeyedBatch) -> Any:
        dataset, collate, look = self._keyed
        if look is not None:
            look({"dataset": dataset, "collate_fn": collate})
        with rng.seeded(batch.seed):
            return collate(dataset[batch.indices])

    def __getitems__(self, batch: KeyedBatch) -> Any:
        dataset, collate, look = self._keyed
        if look is not None:
            look({"dataset": dataset, "collate_fn": collate})
        with rng.seeded(batch.seed):
            several = getattr(dataset, "__getitems__", None)
            items = several(batch.indices) if several else [dataset[index] for index in batch.indices]
            return collate(items)


def _identity(batch: T) -> T:
    return batch
