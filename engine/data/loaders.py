"""What is known of a loader without reading it: its length, whether its order can be keyed, and the order's seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

__all__ = [
    "begin_stream", "can_be_keyed", "can_be_read_once", "draws_from_a_buffer", "draws_nothing", "key_order",
    "length_of", "order_seed", "seed_generator",
]  # fmt: skip

_SEEDED: dict[int, tuple[torch.Generator, int, int | None]] = {}
"""By id: a generator, the seed that it was given here, and the one of its user before; None if it was made here.

It keeps them, 5 KB each: up to torch 2.11 at least, a generator cannot be referenced weakly.
"""


def length_of(loader: object) -> int | None:
    """The number of batches in a pass, or None if the loader has no length.

    With a DistributedSampler and `drop_last`, torch counts samples that are there twice; here the last full batch of
    all ranks is the last.

    >>> length_of(DataLoader(range(10), batch_size=4)), length_of(iter([1, 2]))
    (3, None)
    """
    try:
        length = len(loader)  # type: ignore[arg-type]  # a TypeError is the answer
    except (TypeError, NotImplementedError):
        return None
    if can_be_keyed(loader) and type(loader.sampler) is DistributedSampler and loader.drop_last and loader.batch_size:
        return len(loader.sampler.dataset) // (loader.batch_size * loader.sampler.num_replicas)  # type: ignore[arg-type]
    return length


def can_be_read_once(loader: object) -> bool:
    """Whether it is an iterator. Calls `iter` on iterators alone: on a DataLoader that would start the workers.

    >>> can_be_read_once(iter([1, 2])), can_be_read_once([1, 2])
    (True, False)
    """
    return isinstance(loader, Iterator) and iter(loader) is loader


def can_be_keyed(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether `KeyedLoader` supports it: a DataLoader itself, not a subclass, over a map-style dataset.

    >>> can_be_keyed(DataLoader(range(10))), can_be_keyed([1, 2])
    (True, False)
    """
    return type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)


def draws_nothing(loader: DataLoader[object]) -> bool:
    """Whether reading a batch is known to draw no random numbers, so that its generators need no seeding.

    A custom dataset declares this with an attribute `draws_nothing = True`.

    >>> draws_nothing(DataLoader(range(10))), draws_nothing(DataLoader(range(10), collate_fn=list))
    (True, False)
    """
    return loader.collate_fn in (default_collate, default_convert) and _is_plain(loader.dataset)


def _is_plain(dataset: object) -> bool:
    if type(dataset) is Subset:
        return _is_plain(dataset.dataset)
    if type(dataset) in (ConcatDataset, StackDataset):
        parts = getattr(dataset, "datasets", ())
        return all(map(_is_plain, parts.values() if isinstance(parts, dict) else parts))
    return type(dataset) in (TensorDataset, list, tuple, range) or getattr(dataset, "draws_nothing", False) is True


def draws_from_a_buffer(loader: object) -> bool:
    """Whether a stream of the package datasets shuffles in a buffer, whose examples are not in the stream's state.

    >>> draws_from_a_buffer([1, 2])
    False
    """
    waiting = [getattr(getattr(loader, "dataset", loader), "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable" and getattr(part, "buffer_size", 0) > 1:
            return True
        waiting += [each for each in (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())) if each]
    return False


def draws_in_workers(loader: object) -> bool:
    """Whether reading the rows of a map-style dataset may draw random numbers in worker processes.

    The state of torchdata's StatefulDataLoader lacks the generators of its workers. It reads an `IterableDataset`
    again itself, unless that keeps a state of its own, which then has to hold what it draws from.

    >>> draws_in_workers(DataLoader(range(3), num_workers=1)), draws_in_workers(DataLoader("abc", num_workers=1))
    (False, True)
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return loader.num_workers > 0 and not draws_nothing(loader)


def begin_stream(loader: object, number: int) -> None:
    """Give a stream of the package datasets the number of the pass that begins: 1, 2, ...

    It shuffles each pass in another order, and does not use a state of another pass. Your own streams are left alone.
    """
    dataset = getattr(loader, "dataset", loader)
    if hasattr(dataset, "_ex_iterable") and callable(set_epoch := getattr(dataset, "set_epoch", None)):
        set_epoch(number - 1)


def key_order(loader: object, seed: int) -> None:
    """Seeds the order and the worker seeds of the next pass of a DataLoader that `KeyedLoader` does not support.

    Without this both come from torch's global generator. Samplers without a generator keep their own order.

    >>> loader = DataLoader(range(10), batch_size=10, shuffle=True)
    >>> key_order(loader, 1)
    >>> first = next(iter(loader))
    >>> key_order(loader, 1)
    >>> torch.equal(next(iter(loader)), first)
    True
    """
    if not isinstance(loader, DataLoader):
        return
    for holder in _holders(loader):
        generator = getattr(holder, "generator", 0)  # 0: it has none; a sampler may hold one of numpy's or python's
        if generator is None:
            generator = torch.Generator()
            _SEEDED[id(generator)] = generator, generator.initial_seed(), None
            setattr(holder, "generator", generator)  # noqa: B010  # not every holder declares the attribute
        if isinstance(generator, torch.Generator):
            seed_generator(generator, seed)


def order_seed(loader: object, seed: int, *, chosen: bool = True) -> int:
    """The seed of a loader's order: that of its sampler's or its own generator, as its user seeded it, else the run's.

    >>> own = torch.Generator().manual_seed(5)
    >>> order_seed(DataLoader(range(10), shuffle=True, generator=own), 1), order_seed(DataLoader(range(10)), 1)
    (5, 1)

    Args:
        loader: of any kind. A StatefulDataLoader of torchdata that shuffles has to be given the generator itself, since
            its sampler makes one where it has none.
        seed: the run's.
        chosen: whether the user chose the run's; else that of a DistributedSampler, on which all processes agree, is
            used in its place.
    """
    if not isinstance(loader, DataLoader):
        return seed
    holders = _holders(loader)
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if _is_torchdatas_sampler(holder) and generator is not loader.generator:
            continue  # it has made the generator itself, with a seed from torch's global one
        own = _own_seed(generator) if isinstance(generator, torch.Generator) else None
        if own is not None:
            return own
    shared = next((each.seed for each in holders if isinstance(each, DistributedSampler)), seed)
    return seed if chosen else shared


def _is_torchdatas_sampler(sampler: object) -> bool:
    """Whether it is what torchdata's StatefulDataLoader makes for shuffle=True."""
    kind = type(sampler)
    return (kind.__module__, kind.__name__) == ("torchdata.stateful_dataloader.sampler", "RandomSampler")


def _holders(loader: DataLoader[Any]) -> list[object]:
    """What may hold a generator, the first to decide the order first."""
    samplers = loader.sampler, loader.batch_sampler
    return [*samplers, *(getattr(each, "sampler", None) for each in samplers), loader]


def seed_generator(generator: torch.Generator, seed: int) -> None:
    """Seed a generator for a pass; `order_seed` still gives the seed that its user gave it."""
    own = _own_seed(generator)
    generator.manual_seed(seed)
    _SEEDED[id(generator)] = generator, seed, own


def _own_seed(generator: torch.Generator) -> int | None:
    """The seed that its user gave it; None for one that was made here."""
    now = generator.initial_seed()
    _, seed, own = _SEEDED.get(id(generator), (generator, None, None))
    return own if now == seed else now
