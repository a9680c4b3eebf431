"""Compares two logs: finds the first event that differs, and the events that only one of them holds."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording.diff.environments import environment_differences
from pulsetrain.engine.recording.diff.fields import differing_fields, same
from pulsetrain.engine.recording.diff.growth import Growth, measure_growth
from pulsetrain.engine.recording.diff.result import Divergence, LogDiff, Missing
from pulsetrain.engine.recording.diff.sides import Group, Piece, Side, groups
from pulsetrain.engine.recording.log.reader import EventLog
from pulsetrain.engine.recording.log.records import LoggedEvent

__all__ = ["diff"]


def diff(
    a: str | os.PathLike[str] | EventLog, b: str | os.PathLike[str] | EventLog, rtol: float = 0.0, atol: float = 0.0
) -> LogDiff:
    """Compare the deterministic events of two logs: floats by their bits, or within a tolerance if one is given.

    Times, throughput and other observed values are not compared, nor are superseded events. Of blocks with equal
    digests, no values are compared; if nothing differs, they are read to see whether they are damaged. If the values of
    an event were lost with a killed process, only its engine, type, epoch and iteration are compared.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from pulsetrain.engine.recording import LogWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for run, loss in (("a", 0.5), ("b", 0.25)):
    ...         writer = LogWriter(Path(folder, run))
    ...         event = LoggedEvent(ord=0, engine="trainer", event="iteration_completed", seq=0, t=10**18)
    ...         event.output = {"loss": loss}
    ...         writer.add(event)
    ...     found = diff(Path(folder, "a"), Path(folder, "b"))
    >>> bool(found), found.divergence.fields
    (True, {'output.loss': (0.5, 0.25)})

    Args:
        a: a run folder, its folder `events`, or a log.
        b: the same of the other run.
        rtol: floats agree if they differ by at most this fraction of the larger one,
        atol: or by at most this much.

    Raises:
        RecordingError: one of them holds no log, or one of a newer format.
        ConfigurationError: a tolerance is negative or not a number.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ConfigurationError("needs a number of at least 0", "diff", **{name: value})
    return _Comparison(_side(a), _side(b), rtol, atol).result()


def _side(log: str | os.PathLike[str] | EventLog) -> Side:
    return Side(log if isinstance(log, EventLog) else EventLog(log))


class _Comparison:
    def __init__(self, a: Side, b: Side, rtol: float, atol: float) -> None:
        self.sides = a, b
        self.rtol, self.atol = rtol, atol
        self.agreed = self.unread = 0
        self.divergence: Divergence | None = None
        self.missing: tuple[list[Missing], list[Missing]] = [], []  # by side
        self.forks = a.forked_from(b), b.forked_from(a)  # iterations: a fork's log begins there

    def result(self) -> LogDiff:
        a, b = self.sides
        for group in groups(a.pieces, b.pieces):
            self._compare(group)
        if self.divergence is None:  # "agree" is said of logs that can be read, also where equal digests were enough
            for side in self.sides:
                side.check_blocks()
        missing = sorted([*self.missing[0], *self.missing[1]], key=lambda each: each.first)
        for first in missing[:1]:
            holding = b if first.side == "a" else a
            missing[0] = replace(first, event=next(holding.events_from(first.first), None))
        here, there = a.environment(), b.environment()
        fork = next(
            (
                f"{child.label} was forked from {parent.label} after iteration {iteration}: compared from there on"
                for child, parent, iteration in ((a, b, self.forks[0]), (b, a, self.forks[1]))
                if iteration is not None
            ),
            None,
        )
        damage = [f"{side.label}: {each}" for side in self.sides for each in side.log.damage]
        return LogDiff(
            a.label,
            b.label,
            self.agreed,
            self.divergence,
            tuple(missing),
            self.unread,
            () if here is None or there is None else tuple(environment_differences(here, there)),
            tuple(dict.fromkeys(damage)),
            self._growth,
            fork,
        )

    def _growth(self) -> tuple[Growth, ...]:
        a, b = self.sides
        if self.divergence is None:
            return ()
        start = self.divergence.ord
        engines = a.log.engines or [""]
        return measure_growth(a.events_from(start), b.events_from(start), engines[0])

    def _compare(self, group: Group) -> None:
        a, b = group
        if self.divergence is not None or not a or not b:  # after a divergence, only missing events are reported
            for side, (ours, theirs) in enumerate(((a, b), (b, a))):
                for first, last in _uncovered(theirs, ours):
                    self._note_missing(side, first, last)
        elif len(a) == len(b) == 1 and a[0].digest is not None and a[0].digest == b[0].digest:
            self.agreed += a[0].size
        else:
            self._compare_events(self.sides[0].read(a), self.sides[1].read(b))

    def _compare_events(self, a: dict[int, LoggedEvent], b: dict[int, LoggedEvent]) -> None:
        for ord in sorted(a.keys() | b.keys()):
            x, y = a.get(ord), b.get(ord)
            if x is None or y is None:
                self._note_missing(0 if x is None else 1, ord, ord)
            elif self.divergence is None:
                fields = {} if same(x, y) else differing_fields(x, y, self.rtol, self.atol)
                if fields:
                    self.divergence = Divergence(ord, x, y, fields)
                else:
                    self.agreed += 1

    def _note_missing(self, side: int, first: int, last: int) -> None:
        """Note events that this side lacks: as missing, or as unread if its log may have lost them."""
        lacking, missing = self.sides[side], self.missing[side]
        if self.forks[side] is not None:
            first = max(first, lacking.first)
        if lacking.may_have_lost(first):
            lost = last if lacking.may_have_lost(last) else lacking.last
            self.unread += lost - first + 1
            first = lost + 1
        if first > last:
            return
        if missing and missing[-1].last == first - 1:
            first = missing.pop().first
        missing.append(Missing("ab"[side], first, last))


def _uncovered(pieces: Sequence[Piece], others: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """The ranges of these pieces that none of the others covers."""
    for piece in pieces:
        first = piece.first
        for other in sorted(others, key=lambda other: other.first):
            if other.last < first or other.first > piece.last:
                continue
            if other.first > first:
                yield first, other.first - 1
            first = other.last + 1
        if first <= piece.last:
            yield first, piece.last
