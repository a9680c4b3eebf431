"""The batches of a loader, each divided among virtual ranks: a process reads the shares of those that it computes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Subset

from pulsetrain.engine.data import rng
from pulsetrain.engine.data.keyed_loader import KeyedLoader, KeyedOrder, Look
from pulsetrain.engine.data.loaders import order_seed

__all__ = ["Shares", "VirtualLoader", "VirtualOrder", "order_facts"]


class Shares(NamedTuple):
    """A global batch as the process sees it: one collated batch for each of its virtual ranks."""

    batches: tuple[Any, ...]  # None for a virtual rank without a sample of a last, smaller batch
    first: int  # the virtual rank of the first of them
    seed: int  # of what the step over the global batch draws


class VirtualOrder(KeyedOrder):
    """A `KeyedOrder` of global batches, of which the shares of some virtual ranks are read one by one.

    Virtual rank `v` of `n` has the samples `v`, `v + n`, ... of each global batch. What reading a share draws depends
    on the virtual rank, not on the process.

    >>> order = VirtualOrder(DataLoader(range(6), batch_size=4), 0, here=range(2), count=4)
    >>> list(order), order.rows(1, 0), order.shares_at(4)
    ([[0], [1], [4], [5]], [0, 1, 2, 3], [True, True])

    Args:
        loader: as for `KeyedOrder`.
        seed: likewise.
        here: the virtual ranks that are read.
        count: of all virtual ranks.
    """

    count: int
    here: range

    def __init__(self, loader: DataLoader[Any], seed: int, here: range, count: int) -> None:
        self.here, self.count = here, count
        super().__init__(loader, seed)

    def shares_at(self, position: int) -> list[bool]:
        """Which of the virtual ranks have samples of the global batch at a position."""
        assert self.samples is not None
        left = min(self.step, self.samples - position)
        return [rank < left for rank in self.here]

    def __len__(self) -> int:
        return super().__len__() * len(self.here)

    def _reads(self, indices: Any, number: int, position: int) -> Iterator[Any]:
        for rank in self.here:
            if share := indices[rank :: self.count]:
                yield self._keyed_batch(share, number, position + rank)


class VirtualLoader(KeyedLoader):
    """A `KeyedLoader` that gives `Shares`.

    >>> loader = VirtualLoader(DataLoader(range(6), batch_size=4), 0, None, range(1, 2), 2, run_seed=7)
    >>> [[each.tolist() for each in shares.batches] for shares in loader.begin(1)]
    [[[1, 3]], [[5]]]

    Args:
        loader: over a dataset with a length.
        seed: of the order.
        look: as for `KeyedLoader`.
        here: the virtual ranks of this process.
        count: of all virtual ranks.
        run_seed: of what the steps draw; it may be changed between two passes.
    """

    order: VirtualOrder

    def __init__(
        self, loader: DataLoader[Any], seed: int, look: Look | None, here: range, count: int, run_seed: int
    ) -> None:
        self.run_seed = run_seed
        super().__init__(loader, seed, look, order=VirtualOrder(loader, seed, here, count))

    def begin(self, number: int, position: int = 0, at_position: Any = None) -> Iterator[Any]:
        """The global batches of a pass, as `KeyedLoader.begin`."""
        return self._grouped(super().begin(number, position, at_position), number, position)

    def _grouped(self, shares: Iterator[Any], number: int, position: int) -> Iterator[Shares]:
        order = self.order
        assert order.samples is not None
        for at in range(position, position + order.batches(order.samples - position) * order.step, order.step):
            batches = tuple([next(shares) if has_samples else None for has_samples in order.shares_at(at)])
            yield Shares(batches, order.here.start, rng.derive(self.run_seed, number, at))
        next(shares, None)  # so that workers end as after any pass


def order_facts(loader: Any, seed: int) -> dict[str, object]:
    """What decides which samples the global batches of a DataLoader have: the same in every process.

    >>> list(order_facts(DataLoader(Subset(range(6), [1, 2])), 0))
    ['seed of the order', 'indices of the subset']
    """
    dataset: Any = loader.dataset
    indices = []
    while type(dataset) is Subset:
        indices.append(zlib.crc32(torch.as_tensor(dataset.indices).numpy().tobytes()))
        dataset = dataset.dataset
    return {"seed of the order": order_seed(loader, seed), "indices of the subset": indices}
