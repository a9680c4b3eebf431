"""How much of a global batch is this rank's, so that the averaged gradient is that of the whole batch."""

from __future__ import annotations

from typing import NamedTuple

from pulsetrain.engine.data import rng
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.state.data_cursor import DataCursor

__all__ = ["RankShare", "Share"]


class Share(NamedTuple):
    """A rank's part of a global batch."""

    weight: float  # its size over an even share; 0 for a rank that computes a sample of another one, and counts nothing
    size: float  # of an even share, the same on every rank
    samples: int  # of the global batch
    tokens: int  # likewise


class RankShare:
    """Weighs the batches of a rank, and keys its random numbers.

    The losses that a batch is a mean over are counted by arithmetic where the data's order is known and every sample
    counts alike. Otherwise the ranks add their numbers up, once a batch.

    Args:
        control: joins the ranks.
        data: says which samples are whose.
    """

    def __init__(self, control: ControlGroup, data: DataCursor) -> None:
        self._control, self._data = control, data
        self._adds_up: bool | None = None  # whether the ranks add their numbers up; agreed at the first batch

    def of(self, batch: TrainingBatch, iteration: int) -> Share:
        """This rank's share of the global batch of an iteration; every rank asks at the same time."""
        known, world = self._data.share(iteration), self._control.ranks.world_size
        own = batch.samples if known is None else known[0]
        if self._adds_up is None:
            counts = known is None or batch.weight is not None or batch.tokens > 0
            self._adds_up = self._control.sum([counts], "the first batch")[0] > 0
        if known is not None and not self._adds_up:
            return Share(own / known[1], known[1], round(known[1] * world), 0)
        mine = [float(batch.size), batch.samples, batch.tokens] if own else [0.0, 0, 0]
        size, samples, tokens = self._control.sum(mine, f"the batch of iteration {iteration}")
        even = size / world
        return Share(mine[0] / even if even else 0.0, even, round(samples), round(tokens))

    def seed_generators(self, iteration: int) -> None:
        """Draw what this step draws, for dropout and the like, from a stream of this rank and iteration.

        So ranks draw differently, and a checkpoint need not hold the generators of each.
        """
        rng.seed_step(rng.derive(self._data.seed, self._control.ranks.rank, iteration))
