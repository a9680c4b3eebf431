"""Rollouts of several processes: each draws its share of the texts, and all of them train on all texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.joining import busy, join
from pulsetrain.engine.distributed.ranks import DataRank

__all__ = ["SharedRollout"]

T = TypeVar("T")


class SharedRollout:
    """Shares a rollout out, and puts it together again, in the order that one process would have.

    Args:
        rank: the share of this process.

    >>> alone = SharedRollout(DataRank())
    >>> alone.part([1, 2]), alone.whole([1, 2]), alone.sums([0.5])
    ([1, 2], [1, 2], [0.5])
    """

    def __init__(self, rank: DataRank) -> None:
        self.rank = rank

    @cached_property
    def _control(self) -> ControlGroup:
        return join()  # once a trainer has joined: rollouts may be made before that, in one process alone

    @property
    def is_shared(self) -> bool:
        """Whether there are several processes."""
        return self._control.is_shared

    def part(self, items: Sequence[T]) -> list[T]:
        """This process's share of items, whose number is a multiple of the shares."""
        each = len(items) // self.rank.count
        return list(items[self.rank.rank * each : (self.rank.rank + 1) * each])

    def part_of_batch(self, indices: Tensor) -> Tensor:
        """The rows of a batch that this process trains on."""
        return indices[self.rank.rank :: self.rank.count]

    def whole(self, items: Sequence[T]) -> list[T]:
        """The items of all shares, from this process's part; all processes call this."""
        parts = self._control.gather((self.rank.leads, list(items)))
        return [item for leads, part in parts if leads for item in part]

    def whole_rows(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of all shares, from this process's, with the same names on all; all processes call this."""
        if not self.is_shared:
            return dict(fields)
        found = self._control.gather((self.rank.leads, {name: each.cpu() for name, each in fields.items()}))
        parts = [rows for leads, rows in found if leads]
        return {name: torch.cat([rows[name] for rows in parts]).to(each.device) for name, each in fields.items()}

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sums over all shares."""
        return self._control.sum([value if self.rank.leads else 0.0 for value in values], "the metrics of a rollout")

    def any(self, value: bool) -> bool:
        """Whether it is true in any process; all of them call this."""
        return self._control.sum([value], "drawing a token")[0] > 0 if self.is_shared else value

    def alone(self) -> AbstractContextManager[None]:
        """Around what may take longer in one process than in others, which wait for it."""
        return busy()
