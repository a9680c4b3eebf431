"""The data as a function of (seed, pass, position): which samples make a batch, and what is drawn while they are read.

A DataLoader over a dataset with a length is taken over: its order comes from (seed, pass) alone, whatever the number of
workers and of ranks; a run goes on at any position without reading what lies before it; and python's, numpy's and
torch's generators are seeded anew for each batch, so that augmentations depend neither on the worker that draws them
nor on the model, nor the model's draws on them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from pulsetrain.engine.data import rng

__all__ = [
    "KeyedLoader", "KeyedOrder", "can_be_read_once", "can_take_over", "draws_nothing", "key_order", "length_of",
    "release_workers", "workers_begin", "workers_outlive_signals",
]  # fmt: skip


def length_of(loader: Any) -> int | None:
    """How many batches a pass has, or None where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def can_be_read_once(loader: Any) -> bool:
    """Whether it is an iterator. A DataLoader is not asked for one to find out: that would begin its workers."""
    return isinstance(loader, Iterator) and iter(loader) is loader


def can_take_over(loader: Any) -> bool:
    """Whether `KeyedLoader` knows how to: a DataLoader (no subclass of it) over a dataset that is asked by index."""
    return type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)


def draws_nothing(loader: DataLoader[Any]) -> bool:
    """Whether reading a batch is known to draw no random number, so that nothing need be seeded for it.

    A dataset of one's own says so by an attribute `draws_nothing = True`.
    """
    return loader.collate_fn in (default_collate, default_convert) and _is_plain(loader.dataset)


def _is_plain(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _is_plain(dataset.dataset)
    if type(dataset) in (ConcatDataset, StackDataset):
        parts = dataset.datasets
        return all(map(_is_plain, parts.values() if isinstance(parts, dict) else parts))
    return type(dataset) in (TensorDataset, list, tuple, range) or getattr(dataset, "draws_nothing", False) is True


def key_order(loader: Any, seed: int) -> None:
    """Let the next pass over a DataLoader that is not taken over draw its order and its workers' seeds from `seed`.

    Else both come from torch's global generator. Samplers without a generator keep their own order.
    """
    if not isinstance(loader, DataLoader):
        return
    holders: tuple[Any, ...] = (loader, loader.sampler, loader.batch_sampler)
    for holder in (*holders, *(each.sampler for each in holders[1:] if hasattr(each, "sampler"))):
        if hasattr(holder, "generator"):
            if holder.generator is None:
                holder.generator = torch.Generator()
            if isinstance(holder.generator, torch.Generator):  # else numpy's or python's
                holder.generator.manual_seed(seed)


class KeyedBatch(NamedTuple):
    """What a sampler asks of the dataset: the samples, and the seed of what is drawn while they are read."""

    indices: Any
    seed: int


class KeyedOrder:
    """The index batches of a pass, in an order that (seed, pass) decides, from any position on; a batch sampler.

    The order of all ranks' samples is one, and each global batch of `batch_size * ranks` is shared out among the ranks:
    who goes on with another number of ranks neither repeats nor loses a sample. A last batch with fewer samples is
    shared out, too, unless the loader drops it; a rank for which none is left gets no batch.

    A position counts samples of that order; with a batch sampler of the user's own, which is run as it is, batches.

    Args:
        loader: whose sampler it is: sequential, random and distributed ones are replaced; any other is iterated with
            the generators keyed, its `set_epoch` called before each pass.
        seed: of the run.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self.seed = seed
        self.batched = loader.batch_size is not None or loader.batch_sampler is not None
        sampler: Any = loader.sampler
        batches: Any = loader.batch_sampler
        own_batches = batches is not None and type(batches) is not BatchSampler
        self._batch_size, self._drop_last = 1, False
        if own_batches:
            sampler = batches
        elif batches is not None:  # a BatchSampler that the user made may have another sampler than the loader
            sampler, self._batch_size, self._drop_last = batches.sampler, batches.batch_size, batches.drop_last
        self._own_batches = own_batches
        self._sampler = sampler
        self._ranks, self._rank = 1, 0
        self._shuffle: bool | None = None  # None where the sampler itself is asked
        if type(sampler) is SequentialSampler:
            self._shuffle = False
        elif type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
            self._shuffle = True
        elif type(sampler) is DistributedSampler:
            self._shuffle, self._ranks, self._rank = sampler.shuffle, sampler.num_replicas, sampler.rank
            self._drop_last = self._drop_last or sampler.drop_last
        self._dataset: Any = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
        self._length = length_of(loader)
        self._keyed = not draws_nothing(loader)
        self.begin(1)

    @property
    def step(self) -> int:
        """How far the position moves with a batch."""
        return 1 if self._own_batches else self._batch_size * self._ranks

    @property
    def samples(self) -> int | None:
        """How many samples a pass has, all ranks' together; None if not known, or if the position counts batches."""
        if self._own_batches:
            return None
        return length_of(self._sampler if self._shuffle is None else self._dataset)

    def batches(self, samples: int) -> int:
        """How many batches so many samples of all ranks make."""
        return samples // self.step if self._drop_last else -(-samples // self.step)

    def begin(self, number: int, position: int = 0) -> None:
        """Let the next iteration be that pass, from that position on."""
        self.number, self.position = number, position

    def rows(self, number: int, position: int) -> list[Any]:
        """The indices of the batch at that position of that pass; none behind its end."""
        found: Any = next(self._batches(number, position), [])
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def __iter__(self) -> Iterator[Any]:
        number, position = self.number, self.position
        for indices in self._batches(number, position):
            if self._keyed:
                yield KeyedBatch(indices, rng.derive(self.seed, number, position + self._rank))
            else:
                yield indices
            position += self.step

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("KeyedOrder: the loader has no length")
        return self._length

    def _batches(self, number: int, position: int) -> Iterator[Any]:
        if self._own_batches:
            yield from islice(self._draw(number), position, None)
            return
        samples = self._samples(number, position)
        while chunk := list(islice(samples, self.step)):
            if self._drop_last and len(chunk) < self.step:
                return
            share = chunk[self._rank :: self._ranks]
            if share:
                yield share if self.batched else share[0]

    def _samples(self, number: int, position: int) -> Iterator[int]:
        if self._shuffle is None:
            return islice(self._draw(number), position, None)
        count = len(self._dataset)
        if not self._shuffle:
            return iter(range(position, count))
        generator = torch.Generator().manual_seed(rng.derive(self.seed, number))
        return iter(torch.randperm(count, generator=generator)[position:].tolist())

    def _draw(self, number: int) -> Iterator[Any]:
        """The sampler's own order, drawn beside the process's generators."""
        draws = rng.Draws(rng.derive(self.seed, number))
        if callable(getattr(self._sampler, "set_epoch", None)):
            self._sampler.set_epoch(number - 1)
        for holder in (self._sampler, getattr(self._sampler, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(rng.derive(self.seed, number))
        return draws.around(self._sampler)


class KeyedLoader:
    """Another DataLoader's batches, keyed: see the head of this file.

    The other loader is left as it is; this one has workers of its own, as many, made in the same way.

    Args:
        loader: one that `can_take_over` takes.
        seed: of the run.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self.order = KeyedOrder(loader, seed)
        dataset: Any = loader.dataset
        collate: Callable[[Any], Any] = loader.collate_fn
        if not draws_nothing(loader):
            dataset, collate = _KeyedDataset(loader.dataset, loader.collate_fn, self.order.batched), _as_it_is
        self._generator = torch.Generator()
        self._seed = seed
        options: dict[str, Any] = {"batch_sampler": self.order}
        if not self.order.batched:
            options = {"sampler": self.order, "batch_size": None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own loader has said it already
            self._loader: DataLoader[Any] = DataLoader(
                dataset,
                **options,
                num_workers=loader.num_workers,
                collate_fn=collate,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=_users_own(loader.worker_init_fn),
                multiprocessing_context=loader.multiprocessing_context,
                generator=self._generator,  # else making an iterator draws from the global one
                prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
                persistent_workers=loader.persistent_workers,
                in_order=getattr(loader, "in_order", True),
            )
        # holds the loader until this object is gone: where both go in one garbage collection, torch cannot reach the
        # workers that it kept any more, and waits 5 s for each
        weakref.finalize(self, _as_it_is, self._loader).atexit = False

    def begin(self, number: int, position: int = 0) -> Iterator[Any]:
        """The batches of that pass, from that position on."""
        self._generator.manual_seed(rng.derive(self._seed, number))
        self.order.begin(number, position)
        with workers_begin(self._loader):
            return iter(self._loader)


class _KeyedDataset:
    """A dataset that reads each batch, and collates it, under the batch's own seed.

    Its attributes are the dataset's, which a `worker_init_fn` may read and set.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], batched: bool) -> None:
        self.__dict__["_keyed"] = (dataset, collate, batched)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_keyed" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._keyed[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._keyed[0], name, value)

    def __reduce__(self) -> Any:
        return _KeyedDataset, self._keyed

    def __len__(self) -> int:
        return len(self._keyed[0])

    def __getitem__(self, batch: KeyedBatch) -> Any:
        dataset, collate, _ = self._keyed
        with rng.seeded(batch.seed):
            return collate(dataset[batch.indices])

    def __getitems__(self, batch: KeyedBatch) -> Any:
        dataset, collate, _ = self._keyed
        with rng.seeded(batch.seed):
            several = getattr(dataset, "__getitems__", None)
            items = several(batch.indices) if several else [dataset[index] for index in batch.indices]
            return collate(items)


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def workers_outlive_signals(loader: Any) -> Iterator[tuple[int, ...]]:
    """Workers that a DataLoader begins inside pass over those of SIGINT, SIGTERM and SIGUSR1 that this process handles.

    Who stops a job signals each of its processes: where this one has a handler that lets the run go on to a safe point,
    the run needs its workers until then. They end when it ends them, and with it. Gives the signals' numbers.
    """
    numbers: tuple[int, ...] = ()
    if isinstance(loader, DataLoader) and loader.num_workers > 0 and hasattr(signal, "pthread_sigmask"):
        numbers = tuple(filter(_is_handled, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)))
    if not numbers:
        yield ()
        return
    before = loader.worker_init_fn
    loader.worker_init_fn = _OutliveSignals(numbers, _users_own(before))
    try:
        yield numbers
    finally:
        loader.worker_init_fn = before


@contextmanager
def workers_begin(loader: Any) -> Iterator[None]:
    """For the moment of `iter(loader)`: signals do not reach its workers, either, before these can pass over them."""
    with workers_outlive_signals(loader) as numbers:
        if not numbers:
            yield
            return
        context: Any = loader.multiprocessing_context or multiprocessing.get_context()
        if context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # beginning one unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # a worker inherits that, until it is ready
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_handled(number: int) -> bool:
    handler = signal.getsignal(number)
    return callable(handler) and handler is not signal.default_int_handler


def release_workers() -> None:
    """From now on this process's workers obey SIGTERM, which is how torch and multiprocessing end those that hang."""
    if _released is not None and _released[0] == os.getpid():
        _released[1].value = True


_released: tuple[int, Any] | None = None  # a process, and what its workers read: whether they may end


def _release_flag() -> Any:
    global _released
    if _released is None or _released[0] != os.getpid():  # a forked process has workers and an end of its own
        _released = os.getpid(), RawValue("b", 0)
        # at exit multiprocessing calls this, sends SIGTERM to the workers that are left, and waits for them
        Finalize(None, release_workers, exitpriority=100)
    return _released[1]


class _OutliveSignals:
    """A `worker_init_fn` that comes before the user's own."""

    def __init__(self, numbers: tuple[int, ...], users_own: Callable[[int], None] | None) -> None:
        self.users_own = users_own
        self._numbers, self._released = numbers, _release_flag()

    def __call__(self, worker: int) -> None:
        for number in self._numbers:
            # a function, for what is ignored stays ignored in the programs that a dataset may start
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        if self.users_own is not None:
            self.users_own(worker)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._released.value:
            os._exit(0)  # as torch's own handler does: any other status is an error to the SIGCHLD handler


def _users_own(function: Any) -> Any:
    return function.users_own if isinstance(function, _OutliveSignals) else function
