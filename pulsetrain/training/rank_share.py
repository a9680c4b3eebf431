"""How much of a global batch is this rank's, so that the averaged gradient is that of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pulsetrain.engine.data import rng
from pulsetrain.engine.distributed.agreed_pass import AgreedPass
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.ranks import DataRank
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.state.data_cursor import DataCursor

__all__ = ["RankShare", "Share", "Totals"]


class Totals(NamedTuple):
    """A global batch, the same on every rank."""

    size: float  # what its loss is a mean over
    samples: int
    tokens: int


class Share:
    """A rank's part of a global batch, whose totals may still be added up.

    Args:
        size: of the rank's part; 0 for a rank that computes a sample of another one, and counts nothing.
        expected: of the global batch, above 0: that of the last one, or exactly this one's. The same on every rank.
        totals: waits for the totals.
        rank: whose part it is.
        is_exact: whether the totals are known to be as expected, so that nothing has to be waited for.
    """

    size: float
    expected: float
    is_exact: bool

    def __init__(
        self, size: float, expected: float, totals: Callable[[], Totals], rank: DataRank, *, is_exact: bool
    ) -> None:
        self.size, self.expected, self.is_exact = size, expected, is_exact
        self.counts: bool = size > 0 and rank.leads  # in sums over all ranks
        self._wait, self._shares = totals, rank.count
        self._totals: Totals | None = None

    @property
    def weight(self) -> float:
        """Its size over the expected one of an even share: gradients are averaged over the ranks."""
        return self.size * self._shares / self.expected

    @property
    def totals(self) -> Totals:
        """Those of the global batch; the first reading may wait for the other ranks."""
        if self._totals is None:
            self._totals = self._wait()
        return self._totals


class RankShare:
    """Weighs the batches of a rank, and keys its random numbers.

    The losses that a batch is a mean over are counted by arithmetic where the data's order is known and every sample
    counts alike. Otherwise the ranks add their numbers up, once a batch, while they compute it; for a loader without a
    length, also which of them have a further batch.

    Args:
        control: joins the ranks.
        data: says which samples are whose.
    """

    expected: float
    """The size of the last global batch of at least 1, by which the next one is weighed; 0 if there is none yet."""

    def __init__(self, control: ControlGroup, data: DataCursor) -> None:
        self._control, self._data = control, data
        self.expected = 0.0
        self._adds_up: bool | None = None  # whether the ranks add their numbers up; agreed at the first batch

    def of(self, batch: TrainingBatch, iteration: int) -> Share:
        """This rank's share of the global batch of an iteration; every rank asks at the same time."""
        known, rank = self._data.share(iteration), self._data.rank
        agreed = self._data.agreed
        own = batch.samples if known is None else known[0]
        if agreed is not None and agreed.is_repeated:
            own = 0
        if self._adds_up is None:
            counts = known is None or batch.weight is not None or batch.tokens > 0
            self._adds_up = self._control.sum([counts], "the first batch")[0] > 0
        if known is not None and not self._adds_up:
            samples = round(known[1] * rank.count)
            return Share(own, samples, lambda: Totals(samples, samples, 0), rank, is_exact=True)
        size = float(batch.size) if own else 0.0
        mine = [size, batch.samples, batch.tokens] if own and rank.leads else [0.0, 0, 0]
        has_next = agreed is not None and agreed.has_next
        sums = self._control.start_sum([*mine, has_next], f"the batch of iteration {iteration}")
        if not self.expected:
            self._read(sums, agreed)
        return Share(size, self.expected or 1.0, lambda: self._read(sums, agreed), rank, is_exact=False)

    def _read(self, sums: Callable[[], Sequence[float]], agreed: AgreedPass | None) -> Totals:
        size, samples, tokens, having = sums()
        if agreed is not None:
            agreed.note(having)
        if size >= 1:  # by a batch in which next to nothing counts, the next one would weigh 1e9
            self.expected = size
        return Totals(size, round(samples), round(tokens))

    def seed_generators(self, iteration: int) -> None:
        """Draw what this step draws, for dropout and the like, from a stream of this data rank and iteration.

        So ranks draw differently, and a checkpoint need not hold the generators of each.
        """
        rng.seed_step(rng.derive(self._data.seed, self._data.rank.rank, iteration))
