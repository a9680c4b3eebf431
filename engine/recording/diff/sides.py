"""A log as one side of a comparison: as pieces whose range of events is known before they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pulsetrain.engine.recording.log.reader import EventLog
from pulsetrain.engine.recording.log.records import Json, LoggedEvent
from pulsetrain.engine.recording.log.run_file import read_run_file

__all__ = ["Group", "Piece", "Side", "groups"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of deterministic events, read or not."""

    first: int  # ord
    last: int
    count: int  # upper bound: observed events are counted, too
    seq: int  # of its first event
    digest: str | None  # of all its events; None if they must be compared one by one
    block: int | None  # index of the block that holds them; None if `events` does
    events: tuple[LoggedEvent, ...] = ()

    @property
    def size(self) -> int:
        """The number of its events; an upper bound where the log was thinned."""
        return min(self.last - self.first + 1, self.count)  # a thinned block has fewer


Group = tuple[list[Piece], list[Piece]]  # of both sides: they overlap each other, and no piece of another group


class Side:
    """The deterministic events of a log, without superseded ones."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.pieces: list[Piece] = []
        self._thinned = False
        self._unreadable: list[Piece] = []
        for index, header in enumerate(log.headers):
            self._thinned |= header.thinned > 0
            if header.ord[1] < 0:
                continue
            low, high = header.seq
            ranges = [(after, seam) for after, seam in log.superseded if after < high and low < seam]
            if not ranges:
                self.pieces.append(Piece(*header.ord, header.count, low, header.digest, index))
            elif not any(after < low and high < seam for after, seam in ranges):
                self._add(log.block(index))
        self._add(log.tail)
        self.first: int = min((piece.first for piece in self.pieces), default=0)
        self.last: int = max((piece.last for piece in self.pieces), default=-1)

    def __len__(self) -> int:
        """The number of its events; an upper bound where the log was thinned."""
        return sum(piece.size for piece in self.pieces)

    def _add(self, events: Sequence[LoggedEvent]) -> None:
        live = self._live(events)
        if live:
            ords = [event.ord for event in live]
            self.pieces.append(Piece(min(ords), max(ords), len(live), live[0].seq, None, None, tuple(live)))

    def _live(self, events: Sequence[LoggedEvent]) -> list[LoggedEvent]:
        return [event for event in events if event.ord >= 0 and not self.log.is_superseded(event.seq)]

    def read(self, pieces: Sequence[Piece]) -> dict[int, LoggedEvent]:
        """The events of these pieces by ord, in order; damaged pieces are left out and remembered."""
        events: dict[int, LoggedEvent] = {}
        for piece in sorted(pieces, key=lambda piece: piece.seq):
            found = piece.events if piece.block is None else self._live(self.log.block(piece.block))
            if not found:
                self._unreadable.append(piece)
            events.update((event.ord, event) for event in found)
        return dict(sorted(events.items()))

    def events_from(self, ord: int) -> Iterator[LoggedEvent]:
        """The events from this ord on, in order."""
        for pieces, _ in groups(self.pieces, []):
            if any(piece.last >= ord for piece in pieces):
                yield from (event for event in self.read(pieces).values() if event.ord >= ord)

    def check_blocks(self) -> None:
        """Note the sealed blocks that are damaged, in the log's `damage`."""
        for number in range(len(self.log.headers)):
            if self.log.lines(number) is None:
                self.log.block(number)

    def may_have_lost(self, ord: int) -> bool:
        """Whether a missing event may have been recorded: the log is damaged there, or was thinned."""
        if any(piece.first <= ord <= piece.last for piece in self._unreadable):
            return True
        damaged = bool(self.log.damage)
        if ord > self.last:
            return damaged and not self.log.ended
        return damaged or self._thinned

    @property
    def label(self) -> Path:
        """What messages call the run folder."""
        return Path(self.log.run.name)

    @cached_property
    def facts(self) -> dict[str, Json]:
        """The content of run.json; empty if it is missing or damaged."""
        return read_run_file(self.log.run_folder)

    def environment(self) -> dict[str, Json] | None:
        """The environment that run.json describes."""
        found = self.facts.get("environment")
        return found if isinstance(found, dict) else None

    def forked_from(self, other: Side) -> int | None:
        """The last iteration of the other run before this one was forked from it; None if it was not."""
        parent = self.facts.get("parent")
        if not isinstance(parent, dict) or parent.get("id") is None or parent["id"] != other.facts.get("id"):
            return None
        iteration = parent.get("iteration")
        return iteration if isinstance(iteration, int) else None


def groups(a: Sequence[Piece], b: Sequence[Piece]) -> Iterator[Group]:
    """Group the pieces of both sides that overlap, in the order of ord."""
    tagged = [*((piece, 0) for piece in a), *((piece, 1) for piece in b)]
    tagged.sort(key=lambda each: (each[0].first, each[0].seq))
    group: Group = [], []
    end = -1
    for piece, side in tagged:
        if piece.first > end and end >= 0:
            yield group
            group = [], []
        group[side].append(piece)
        end = max(end, piece.last)
    if end >= 0:
        yield group
