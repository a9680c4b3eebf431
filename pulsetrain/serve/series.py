"""Every point of a run's curves, so that a part of them can be drawn in detail; on disk once the run has ended."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pulsetrain.engine.recording import EventLog, LoggedEvent
from pulsetrain.engine.recording.log.follower import LogFollower
from pulsetrain.report.curve import Curve, Floats
from pulsetrain.report.marks import Marks
from pulsetrain.report.run_curves import RunCurves
from pulsetrain.serve.other_ranks import anomalies_of_other_ranks

__all__ = ["NEW", "TOKENS", "Described", "Happened", "Points", "RunSeries", "StoredSeries", "drawn", "tokens_at"]

Points: TypeAlias = tuple[Floats, Floats, Floats]
"""Iterations, seconds since the run's first event, and values."""

_VERSION = 6
_PART = 0.05  # seconds in which a part of a log is read, so that not all its events are in memory at once
_ABOUT, _HAPPENED, _POINTS = "about.json", "happened.json", "points"
NEW = ".new-"  # begins the name of a folder whose points are being written
TOKENS = " tokens"  # under which their number is kept beside the curves, whose names do not begin with a space


class Described(msgspec.Struct):
    """What a run's log says besides the points."""

    version: int
    sign: str  # of the files that it was read from
    names: list[str]  # of the curves
    validated: list[str]  # the curves whose values a validation has reported
    rolled_out: list[str]
    lengths: list[int]  # points of each curve, and of TOKENS
    first: int  # iteration
    last: int
    damage: list[str]


class Happened(msgspec.Struct):
    """What a run's log says of single moments: of long runs, much more than the rest besides the points."""

    marks: dict[str, list[tuple[int, str, str]]]  # row of the timeline -> iteration, text and kind of each
    texts: dict[str, tuple[int, str]]
    custom: dict[str, list[tuple[int, str, str]]]  # the same as `marks`, of the user's own events by type


class _Series(Curve):
    """A curve that keeps every point.

    Args:
        seconds: the time of the event that is being read.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        super().__init__()
        self._at, self._seconds, self._all = array("d"), array("d"), array("d")
        self._now = seconds

    def add(self, iteration: int, value: float) -> None:
        self._at.append(iteration)
        self._seconds.append(self._now())
        self._all.append(value)

    @property
    def last(self) -> tuple[int, float]:
        return int(self._at[-1]), self._all[-1]

    def points(self, limit: int = 0) -> tuple[Floats, Floats]:  # all of them
        return np.array(self._at), np.array(self._all)

    def settle(self) -> None:
        """Nothing is pending."""

    def __len__(self) -> int:
        return len(self._at)

    def whole(self) -> Points:
        """All points."""
        return np.array(self._at), np.array(self._seconds), np.array(self._all)


class RunSeries(RunCurves):
    """The points of a run, read from its log as far as it is written.

    Args:
        folder: the run folder.
        seconds: read for about this time, as `update` does.

    Raises:
        RecordingError: it holds no event log.
    """

    def __init__(self, folder: Path, seconds: float | None = None) -> None:
        self._folder = folder
        self._log = LogFollower(folder / "events")
        self._begin(EventLog(folder))
        self.update(seconds)

    def _begin(self, log: EventLog) -> None:
        super().__init__(log.main_engine if log.engines else "")
        self._generation = self._log.generation
        self._seconds = 0.0
        self._begun: int | None = None

    def make_curve(self) -> Curve:
        return _Series(lambda: self._seconds)

    @property
    def is_complete(self) -> bool:
        """Whether the log has been read as far as it was written, or is gone."""
        return self._log.share == 1.0 or not self._log.exists

    def update(self, seconds: float | None = None, *, killed: bool = False) -> bool:
        """Read what has been written since; returns whether there was anything.

        Args:
            seconds: return after about this time, although there may be more.
            killed: the process that has written it is gone: events that it had begun count as they are.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        is_changed = self._read_part()
        while not self.is_complete and (deadline is None or time.monotonic() < deadline):
            is_changed |= self._read_part()
        if killed and (left := self._log.finish()):
            self._add_all(left)
            is_changed = True
        return is_changed

    def _read_part(self) -> bool:
        events = self._log.read(_PART)
        if self.engine not in ("", "trainer") and any(event.engine == "trainer" for event in events):
            self._log.restart()  # which is the training engine, although another one was the first
            self._begin(EventLog(self._folder))
            events = self._log.read(_PART)
        self._add_all(events)
        return bool(events)

    def _add_all(self, events: list[LoggedEvent]) -> None:
        if events and (self._log.generation != self._generation or not self.engine):
            self._begin(EventLog(self._folder))  # earlier events do not count any more
        for event in events:
            if self._begun is None:
                self._begun = event.t
            self._seconds = max(self._seconds, (event.t - self._begun) / 1e9)  # a clock may be put back
            self.add(event)

    def points(self, name: str) -> Points | None:
        """The points of a curve; None if the run has no such curve."""
        curve = self.curves_and_tokens().get(name)
        return None if curve is None else curve.whole()

    def curves_and_tokens(self) -> dict[str, _Series]:
        """The curves, and the tokens."""
        every = {**self.shown(), TOKENS: self.tokens}
        return {name: curve for name, curve in every.items() if isinstance(curve, _Series)}

    def described(self, sign: str = "") -> Described:
        """All but the points and the moments."""
        return Described(
            version=_VERSION,
            sign=sign,
            names=list(self.shown()),
            validated=list(self.validated),
            rolled_out=list(self.rolled_out),
            lengths=[len(curve) for curve in self.curves_and_tokens().values()],
            first=self.first_iteration or 0,
            last=self.iteration,
            damage=[str(each) for each in self._log.damage],
        )

    def happened(self) -> Happened:
        """The moments; those of other ranks than 0 are only anomalies."""
        marks, others = _plain(self.marks), _plain({"anomalies": anomalies_of_other_ranks(self._folder)})
        marks["anomalies"] = sorted([*marks["anomalies"], *others["anomalies"]], key=lambda each: each[0])
        return Happened(marks, dict(self.texts), _plain(self.custom))


def _plain(rows: Mapping[str, Marks]) -> dict[str, list[tuple[int, str, str]]]:
    return {row: [(mark.iteration, str(mark), mark.kind) for mark in marks] for row, marks in rows.items()}


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
            about = msgspec.json.decode((folder / _ABOUT).read_bytes(), type=Described)
            if (about.version, about.sign) == (_VERSION, sign):
                return cls(folder, about)
        return None

    @classmethod
    def write(cls, folder: Path, series: RunSeries, sign: str) -> StoredSeries:
        """Write all points; a process that is killed meanwhile leaves nothing that is read."""
        about = series.described(sign)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=NEW, dir=folder.parent) as made:
            with Path(made, _POINTS).open("wb") as file:
                for curve in series.curves_and_tokens().values():
                    for numbers in curve.whole():
                        numbers.tofile(file)
            Path(made, _HAPPENED).write_bytes(msgspec.json.encode(series.happened()))
            Path(made, _ABOUT).write_bytes(msgspec.json.encode(about))
            shutil.rmtree(folder, ignore_errors=True)
            try:
                Path(made).rename(folder)
            except OSError:
                found = cls.open(folder, sign)  # another server has just written them
                if found is None:
                    raise
                return found
            Path(made).mkdir()  # for the context, which deletes it
        return cls(folder, about)

    @property
    def is_there(self) -> bool:
        """Whether its files are still there: they may be deleted at any time."""
        return os.path.exists(f"{self.folder}/{_POINTS}")  # as a Path, ten times slower

    def opened(self) -> StoredSeries:
        """The same, whose file stays open from the first curve that is read until it is dropped."""
        return StoredSeries(self.folder, self.about)

    @cached_property
    def _mapped(self) -> mmap.mmap:
        with open(f"{self.folder}/{_POINTS}", "rb", buffering=0) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # a tenth of the time of numpy's memmap

    def points(self, name: str) -> Points | None:
        """The points of a curve, read where they are looked at; None if the run has none, or its files are gone."""
        names, lengths = [*self.about.names, TOKENS], self.about.lengths
        if name not in names:
            return None
        number = names.index(name)
        if not lengths[number]:
            return np.empty(0), np.empty(0), np.empty(0)
        try:
            begin, count = 3 * 8 * sum(lengths[:number]), lengths[number]
            at, seconds, values = np.frombuffer(self._mapped, "=f8", 3 * count, begin).reshape(3, count)
        except (OSError, ValueError):
            return None
        return at, seconds, values

    def happened(self) -> Happened:
        """The moments; none if their file is gone."""
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((self.folder / _HAPPENED).read_bytes(), type=Happened)
        return Happened({}, {}, {})


def tokens_at(counted: Points, at: NDArray[Any]) -> Floats:
    """The tokens that were trained until some iterations, between two counts in proportion.

    >>> counts = np.array([10, 20]), np.array([1.0, 2.0]), np.array([1000.0, 3000.0])
    >>> tokens_at(counts, np.array([5, 10, 15])).tolist()
    [500.0, 1000.0, 2000.0]

    Args:
        counted: the counts that the run has recorded, at least one.
        at: iterations in ascending order. After the last count, tokens are counted at the last pace.
    """
    steps = np.concatenate([[0.0], counted[0]])
    totals = np.concatenate([[0.0], counted[2]])
    pace = (totals[-1] - totals[-2]) / max(steps[-1] - steps[-2], 1.0)
    found: Floats = np.interp(at, steps, totals) + pace * np.maximum(at - steps[-1], 0.0)
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
    first = 0 if low is None else max(int(np.searchsorted(x, low)) - 1, 0)
    last = len(x) if high is None else min(int(np.searchsorted(x, high, "right")) + 1, len(x))
    x, values = x[first:last], values[first:last]
    if len(x) <= limit:
        return np.array(x), np.array(values)  # copies: a part of a mapped file would keep it open
    size = -(-len(x) // (limit // 2))
    whole = len(x) // size * size
    rows = np.asarray(values[:whole]).reshape(-1, size)
    starts = np.arange(0, whole, size)
    low_at, high_at = rows.argmin(axis=1) + starts, rows.argmax(axis=1) + starts
    if np.isnan(values[low_at]).any():  # both give the first NaN of an interval
        bare = np.isnan(rows)
        low_at = np.where(bare, np.inf, rows).argmin(axis=1) + starts
        high_at = np.where(bare, -np.inf, rows).argmax(axis=1) + starts
    picked = np.column_stack([np.minimum(low_at, high_at), np.maximum(low_at, high_at)]).ravel()
    if whole < len(x):
        rest = values[whole:]
        ends = (
            [whole + int(np.nanargmin(rest)), whole + int(np.nanargmax(rest))] if not np.isnan(rest).all() else [whole]
        )
        picked = np.concatenate([picked, np.array(sorted(ends))])
    picked = picked[np.diff(picked, prepend=-1) > 0]
    return x[picked], values[picked]
