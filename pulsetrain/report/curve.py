"""A curve of any length in bounded memory: buckets that keep their least and greatest value."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["POINTS", "Curve", "Floats"]

Floats: TypeAlias = NDArray[np.float64]

POINTS = 2000  # to draw at most, besides the first and the last
_PENDING = 4096  # points to collect before they are put into buckets

# Buckets are the columns of an array with these rows. A bucket counts only finite values.
_LAST, _LOW_AT, _LOW, _HIGH_AT, _HIGH, _SUM, _COUNT = range(7)


class Curve:
    """Values over iterations, added one by one.

    Up to 2,000 points are kept exactly. After that, neighbours share a bucket, which keeps its least and its greatest
    value with their iterations, so that no spike is lost. When there are too many buckets, pairs are merged.

    >>> curve = Curve()
    >>> for iteration in range(10_000):
    ...     curve.add(iteration, 9.0 if iteration == 777 else 1.0)
    >>> curve.settle()
    >>> curve.greatest, len(curve.points()[0]) <= POINTS + 2
    ((9.0, 777), True)
    """

    def __init__(self) -> None:
        self._iterations: list[int] = []  # not in a bucket yet
        self._values: list[float] = []
        self._buckets: Floats = np.empty((7, 0))
        self._size = 1  # points per bucket
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] = (0, math.nan)
        self.least: tuple[float, int] | None = None  # value and iteration, the earliest of several
        self.greatest: tuple[float, int] | None = None

    def add(self, iteration: int, value: float) -> None:
        """Add a point; NaN, for any value that is not finite, leaves a gap."""
        self._iterations.append(iteration)
        self._values.append(value)
        if len(self._values) >= _PENDING and len(self._values) >= self._size:
            self._pack()

    @property
    def last(self) -> tuple[int, float]:
        """The newest point."""
        return (self._iterations[-1], self._values[-1]) if self._values else self._last

    def points(self, limit: int = POINTS) -> tuple[Floats, Floats]:
        """Iterations and values to draw: at most `limit` and two more, including the least and the greatest."""
        buckets = self._fitting(limit)
        order = np.where(buckets[_LOW_AT] <= buckets[_HIGH_AT], 0, 1)
        at = np.stack([buckets[_LOW_AT], buckets[_HIGH_AT]], axis=1)
        values = np.stack([buckets[_LOW], buckets[_HIGH]], axis=1)
        picks = np.stack([order, 1 - order], axis=1)
        at, values = (np.take_along_axis(each, picks, axis=1) for each in (at, values))
        kept = np.ones(at.shape, dtype=bool)
        kept[:, 1] = at[:, 1] != at[:, 0]
        at, values = at[kept], values[kept]
        first = self._first
        if first is None and self._values:
            first = (self._iterations[0], self._values[0])
        if first is not None and len(at):
            if at[0] != first[0]:
                at, values = np.append(first[0], at), np.append(first[1], values)
            if at[-1] != self.last[0]:
                at, values = np.append(at, self.last[0]), np.append(values, self.last[1])
        return at, values

    def smoothed(self, length: float, most: float, limit: int = POINTS) -> tuple[Floats, Floats]:
        """Iterations and exponential averages, at most `limit`.

        The mean of a bucket has the weight 1 - exp(-d / length), where d is the distance to the bucket before in
        iterations, and at most `most`. The average is divided by the sum of the weights, so that the first values do
        not dominate.

        Args:
            length: iterations in which a value's weight falls to 1/e.
            most: the greatest weight of one point, for curves whose points are far apart.
            limit: the number of points, at most.
        """
        buckets = self._fitting(limit)
        averages, total, weight, before = [], 0.0, 0.0, -math.inf
        for at, sum_, count in zip(buckets[_LAST], buckets[_SUM], buckets[_COUNT], strict=True):
            if not count:
                averages.append(math.nan)
                continue
            share = min(most, -math.expm1(-max(at - before, 0.0) / length))
            total += share * (sum_ / count - total)
            weight += share * (1.0 - weight)
            averages.append(total / weight if weight else sum_ / count)
            before = at
        return buckets[_LAST], np.asarray(averages, dtype=float)

    def _fitting(self, limit: int) -> Floats:
        """The buckets and the pending points, merged until they are drawn with at most `limit` points.

        The pending points stay pending: a bucket that is put away each time a growing curve is drawn would be small.
        """
        buckets = self._buckets
        if self._values:
            at, values = (np.asarray(each, dtype=float) for each in (self._iterations, self._values))
            self._note_extremes(at, values)
            buckets = np.concatenate([buckets, _joined(_single(at, values), self._size)], axis=1)
        while _points_of(buckets) > limit:
            buckets = _joined(buckets, 2)
        return buckets

    def _pack(self, whole: bool = False) -> None:
        """Put the pending points into buckets; with `whole`, all of them, so that the last bucket may not be full."""
        count = len(self._values) if whole else len(self._values) // self._size * self._size
        if not count:
            return
        at = np.asarray(self._iterations[:count], dtype=float)
        values = np.asarray(self._values[:count], dtype=float)
        if self._first is None:
            self._first = (int(at[0]), float(values[0]))
        self._last = (int(at[-1]), float(values[-1]))
        self._note_extremes(at, values)
        self._buckets = np.concatenate([self._buckets, _joined(_single(at, values), self._size)], axis=1)
        del self._iterations[:count], self._values[:count]
        while _points_of(self._buckets) > POINTS:
            self._buckets = _joined(self._buckets, 2)
            self._size *= 2

    def _note_extremes(self, at: Floats, values: Floats) -> None:
        if np.isnan(values).all():
            return
        low, high = int(np.nanargmin(values)), int(np.nanargmax(values))
        if self.least is None or values[low] < self.least[0]:
            self.least = (float(values[low]), int(at[low]))
        if self.greatest is None or values[high] > self.greatest[0]:
            self.greatest = (float(values[high]), int(at[high]))

    def settle(self) -> None:
        """Put all pending points into buckets, so that `least` and `greatest` include them."""
        self._pack(whole=True)


def _single(at: Floats, values: Floats) -> Floats:
    """A bucket for each point."""
    finite = ~np.isnan(values)
    return np.stack([at, at, values, at, values, np.where(finite, values, 0.0), finite.astype(float)])


def _points_of(buckets: Floats) -> int:
    """The number of points that they are drawn with: one for a bucket of one point, else two."""
    return len(buckets[_LAST]) + int(np.count_nonzero(buckets[_LOW_AT] != buckets[_HIGH_AT]))


def _joined(buckets: Floats, size: int) -> Floats:
    """Merge each `size` neighbours into one bucket; the last may have fewer."""
    if size == 1:
        return buckets
    missing = -buckets.shape[1] % size
    if missing:
        buckets = np.pad(buckets, ((0, 0), (0, missing)), mode="edge")
        buckets[_SUM:, -missing:] = 0.0
    groups = buckets.reshape(len(buckets), -1, size)
    each = np.arange(groups.shape[1])
    low = np.where(np.isnan(groups[_LOW]), np.inf, groups[_LOW]).argmin(axis=1)
    high = np.where(np.isnan(groups[_HIGH]), -np.inf, groups[_HIGH]).argmax(axis=1)
    with np.errstate(over="ignore"):  # the largest floats overflow when they are added
        sums = groups[_SUM].sum(axis=1)
    return np.stack(
        [
            groups[_LAST, :, -1],
            groups[_LOW_AT, each, low],
            groups[_LOW, each, low],
            groups[_HIGH_AT, each, high],
            groups[_HIGH, each, high],
            sums,
            groups[_COUNT].sum(axis=1),
        ]
    )
