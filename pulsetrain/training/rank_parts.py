"""Which part of a validation set a rank evaluates, so that each sample counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from ignite.metrics import Metric as IgniteMetric
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from pulsetrain.engine.data.loaders import length_of
from pulsetrain.engine.distributed.ranks import Ranks, is_sharded

__all__ = ["RankParts"]


class RankParts:
    """Gives each rank every n-th batch of a set.

    A DataLoader that reads a dataset with a length in order is shared out, if each rank gets a batch, every metric is
    known to be merged over the ranks, and the forward pass needs no other rank. Every rank evaluates the whole of any
    other set.

    >>> loader = DataLoader(range(7), batch_size=2)
    >>> [batch.tolist() for batch in RankParts(Ranks(1, 2)).of(loader, nn.Identity(), [])]
    [[2, 3], [6]]

    Args:
        ranks: this one, and how many there are.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._made: WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = WeakKeyDictionary()  # for persistent workers

    def of(self, loader: Iterable[Any], model: object, metrics: Iterable[object]) -> Iterable[Any]:
        """The rank's part of the set, or the set itself."""
        if self._ranks.world_size == 1 or not self._can_be_shared_out(loader) or not all(map(_is_merged, metrics)):
            return loader
        modules = model.modules() if isinstance(model, nn.Module) else ()
        if any(isinstance(module, DistributedDataParallel) for module in modules) or is_sharded(model):
            return loader  # it sends its buffers, or gathers its weights, in each forward pass
        assert isinstance(loader, DataLoader)
        part = self._made.get(loader)
        if part is None:
            part = self._made[loader] = DataLoader(
                loader.dataset,
                batch_sampler=_EveryNth(loader.batch_sampler, self._ranks),
                num_workers=loader.num_workers,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
                generator=loader.generator,
                prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
                persistent_workers=loader.persistent_workers,
            )
        return part

    def _can_be_shared_out(self, loader: object) -> bool:
        return (
            type(loader) is DataLoader
            and not isinstance(loader.dataset, IterableDataset)
            and type(loader.batch_sampler) is BatchSampler
            and type(loader.batch_sampler.sampler) is SequentialSampler
            and (length_of(loader) or 0) >= self._ranks.world_size
        )


class _EveryNth:
    """Of a batch sampler's batches, those of a rank."""

    def __init__(self, batches: Any, ranks: Ranks) -> None:
        self._batches, self._ranks = batches, ranks

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._batches), self._ranks.rank, None, self._ranks.world_size)

    def __len__(self) -> int:
        return len(range(self._ranks.rank, len(self._batches), self._ranks.world_size))


@contextmanager
def unmerged(metrics: Iterable[object]) -> Iterator[None]:
    """While each rank evaluates the whole set: metrics of torchmetrics do not count the other ranks' samples again."""
    own: list[Any] = [each for each in metrics if getattr(each, "sync_on_compute", False) is True]
    for each in own:  # it reads the second name, which its constructor has copied from the first
        each.sync_on_compute = each._to_sync = False  # noqa: SLF001
    try:
        yield
    finally:
        for each in own:
            each.sync_on_compute = each._to_sync = True  # noqa: SLF001


def _is_merged(metric: object) -> bool:
    """Whether the metric is known to give the value over the samples of all ranks."""
    if isinstance(metric, IgniteMetric):  # one whose sums are added up; others gather rows, of which each has as many
        return bool(getattr(type(metric).compute, "_decorated", False))
    return getattr(metric, "sync_on_compute", False) is True  # of torchmetrics
