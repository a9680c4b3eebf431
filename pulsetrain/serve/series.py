"""Every point of a run's curves, so that a part of them can be drawn in detail; on disk once the run has ended."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.log.follower import LogFollower
from pulsetrain.report.curve import Curve, Floats
from pulsetrain.report.run_curves import RunCurves

__all__ = ["TOKENS", "Described", "Points", "RunSeries", "StoredSeries", "drawn", "tokens_at"]

Points: TypeAlias = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""Iterations, seconds since the run's first event, and values."""

_VERSION = 3
TOKENS = " tokens"  # under which their number is kept beside the curves, whose names do not begin with a space


class Described(msgspec.Struct):
    """What a run's log says besides the points."""

    version: int
    sign: str  # of the files that it was read from
    names: list[str]  # of the curves
    validated: list[str]  # the curves whose values a validation has reported
    rolled_out: list[str]
    marks: dict[str, list[tuple[int, str, str]]]  # row of the timeline -> iteration, text and kind of each
    texts: dict[str, tuple[int, str]]
    first: int  # iteration
    last: int
    damage: list[str]


class _Series(Curve):
    """A curve that keeps every point.

    Args:
        seconds: the time of the event that is being read.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        super().__init__()
        self._at, self._seconds, self._all = array("q"), array("d"), array("d")
        self._now = seconds

    def add(self, iteration: int, value: float) -> None:
        self._at.append(iteration)
        self._seconds.append(self._now())
        self._all.append(value)

    @property
    def last(self) -> tuple[int, float]:
        return self._at[-1], self._all[-1]

    def points(self, limit: int = 0) -> tuple[Floats, Floats]:  # all of them
        return np.array(self._at, dtype=float), np.array(self._all, dtype=float)

    def settle(self) -> None:
        """Nothing is pending."""

    def whole(self) -> Points:
        """All points."""
        return np.array(self._at), np.array(self._seconds), np.array(self._all)


class RunSeries(RunCurves):
    """The points of a run, read from its log as far as it is written.

    Args:
        folder: the run folder.

    Raises:
        RecordingError: it holds no event log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = LogFollower(folder / "events")
        self._begin(EventLog(folder))
        self.update()

    def _begin(self, log: EventLog) -> None:
        super().__init__(log.main_engine if log.engines else "")
        self._generation = self._log.generation
        self._seconds = 0.0
        self._begun: int | None = None

    def make_curve(self) -> Curve:
        return _Series(lambda: self._seconds)

    def update(self, *, killed: bool = False) -> bool:
        """Read what has been written since; returns whether there was anything.

        Args:
            killed: the process that has written it is gone: events that it had begun count as they are.
        """
        events = self._log.read()
        if killed:
            events += self._log.finish()
        if events and (self._log.generation != self._generation or not self.engine):
            self._begin(EventLog(self._folder))  # earlier events do not count any more
        for event in events:
            if self._begun is None:
                self._begun = event.t
            self._seconds = (event.t - self._begun) / 1e9
            self.add(event)
        return bool(events)

    def points(self, name: str) -> Points | None:
        """The points of a curve; None if the run has no such curve."""
        curve = self.tokens if name == TOKENS else self.shown().get(name)
        return curve.whole() if isinstance(curve, _Series) else None

    def described(self, sign: str = "") -> Described:
        """All but the points."""
        return Described(
            version=_VERSION,
            sign=sign,
            names=list(self.shown()),
            validated=list(self.validated),
            rolled_out=list(self.rolled_out),
            marks={row: [(mark.iteration, str(mark), mark.kind) for mark in self.marks[row]] for row in self.marks},
            texts=self.texts,
            first=self.first_iteration or 0,
            last=self.iteration,
            damage=[str(each) for each in self._log.damage],
        )


@dataclass(frozen=True)
class StoredSeries:
    """The points of a run that has ended, in files that are read where they are drawn.

    Args:
        folder: theirs.
        about: what else the run's log says.
    """

    folder: Path
    about: Described

    @classmethod
    def open(cls, folder: Path, sign: str) -> StoredSeries | None:
        """Those that were written for a log with this sign; None if there are none."""
        with suppress(OSError, msgspec.MsgspecError):
            about = msgspec.json.decode((folder / "about.json").read_bytes(), type=Described)
            if (about.version, about.sign) == (_VERSION, sign):
                return cls(folder, about)
        return None

    @classmethod
    def write(cls, folder: Path, series: RunSeries, sign: str) -> StoredSeries:
        """Write all points; a process that is killed meanwhile leaves nothing that is read."""
        about = series.described(sign)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as made:
            for number, name in enumerate([*about.names, TOKENS]):
                found = series.points(name)
                assert found is not None
                at, seconds, values = found
                small = at.astype(np.int32) if at.max(initial=0) < 2**31 else at
                for part, numbers in (("at", small), ("seconds", seconds), ("values", values)):
                    numbers.tofile(Path(made, f"{number}.{part}"))
            Path(made, "about.json").write_bytes(msgspec.json.encode(about))
            shutil.rmtree(folder, ignore_errors=True)
            Path(made).rename(folder)
            Path(made).mkdir()  # for the context, which deletes it
        return cls(folder, about)

    def points(self, name: str) -> Points | None:
        """The points of a curve; None if the run has no such curve, or its files are gone."""
        if name not in (*self.about.names, TOKENS):
            return None
        number = [*self.about.names, TOKENS].index(name)
        try:
            values, seconds = (_mapped(self.folder / f"{number}.{part}", "=f8") for part in ("values", "seconds"))
            at = _mapped(self.folder / f"{number}.at", "=i4")
            if len(at) == 2 * len(values):
                at = at.view("=i8")
        except (OSError, ValueError):
            return None
        return (at, seconds, values) if len(at) == len(seconds) == len(values) else None


def _mapped(path: Path, kind: str) -> NDArray[Any]:
    """The numbers of a file, read where they are looked at; a tenth of the time of numpy's own format."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return np.empty(0, kind)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), kind)


def tokens_at(counted: Points | None, at: NDArray[Any]) -> NDArray[Any] | None:
    """The tokens that were trained until some iterations, between two counts in proportion; None if none were counted.

    >>> counts = np.array([10, 20]), np.array([1.0, 2.0]), np.array([1000.0, 3000.0])
    >>> tokens_at(counts, np.array([5, 10, 15])).tolist()
    [500.0, 1000.0, 2000.0]

    Args:
        counted: the counts that the run has recorded.
        at: iterations in ascending order. After the last count, tokens are counted at the last pace.
    """
    if counted is None or not len(counted[0]):
        return None
    steps = np.concatenate([[0.0], np.asarray(counted[0], dtype=float)])
    totals = np.concatenate([[0.0], counted[2]])
    pace = (totals[-1] - totals[-2]) / max(steps[-1] - steps[-2], 1.0)
    places = np.asarray(at, dtype=float)
    found: NDArray[Any] = np.interp(places, steps, totals) + pace * np.maximum(places - steps[-1], 0.0)
    return found


def drawn(
    x: NDArray[Any], values: NDArray[Any], low: float | None, high: float | None, limit: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """At most `limit` points between two places, with the least and the greatest value of every interval.

    >>> x, values = np.arange(1000), np.arange(1000) % 2.0
    >>> values[777] = 9
    >>> at, shown = drawn(x, values, 500, None, 20)
    >>> len(at), int(at[shown.argmax()]), float(shown.max())
    (20, 777, 9.0)

    Args:
        x: in ascending order.
        values: as many.
        low: the first place; None for the beginning. The next point outside is drawn, too.
        high: the last one.
        limit: at least 4.
    """
    if x.dtype.kind == "i":  # a number of another type would have the whole array converted
        limits = np.iinfo(x.dtype)
        low = None if low is None else x.dtype.type(min(max(math.ceil(low), limits.min), limits.max))
        high = None if high is None else x.dtype.type(min(max(math.floor(high), limits.min), limits.max))
    first = 0 if low is None else max(int(np.searchsorted(x, low)) - 1, 0)
    last = len(x) if high is None else min(int(np.searchsorted(x, high, "right")) + 1, len(x))
    x, values = x[first:last], values[first:last]
    if len(x) <= limit:
        return np.asarray(x), np.asarray(values)
    size = -(-len(x) // (limit // 2))
    whole = len(x) // size * size
    rows = np.asarray(values[:whole]).reshape(-1, size)
    bare = np.isnan(rows).any()
    low_at = (np.where(np.isnan(rows), np.inf, rows) if bare else rows).argmin(axis=1)
    high_at = (np.where(np.isnan(rows), -np.inf, rows) if bare else rows).argmax(axis=1)
    at = np.sort(np.stack([low_at, high_at], axis=1), axis=1) + np.arange(len(rows))[:, None] * size
    picked = at.ravel()
    if whole < len(x):
        rest = values[whole:]
        ends = (
            [whole + int(np.nanargmin(rest)), whole + int(np.nanargmax(rest))] if not np.isnan(rest).all() else [whole]
        )
        picked = np.concatenate([picked, np.array(sorted(ends))])
    picked = np.unique(picked)
    return x[picked], values[picked]
