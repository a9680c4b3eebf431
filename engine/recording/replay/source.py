"""A log as a replay reads it: the events that have receivers, and what had happened before one of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter

import msgspec

from pulsetrain.engine.events.names import Events
from pulsetrain.engine.recording.log.reader import EventLog
from pulsetrain.engine.recording.log.records import LoggedEvent, decode

__all__ = ["Ahead", "Past", "Source"]

MOST_TYPES = 6  # searched for one by one; for more, the whole block is decoded
KEPT = 2  # blocks

_SAVED = Events.CHECKPOINT_SAVED.value
_by_seq = attrgetter("seq")


class Source:
    """A log in blocks of events, without those that a resumed run has computed again."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._headers = log.headers
        self._superseded = log.superseded
        self._resumed_from = frozenset(_resumed_from(log))
        self._tail = self._valid(log.tail)
        self._kept: dict[int, list[LoggedEvent]] = {}
        if self._tail:
            self._kept[len(self._headers)] = self._tail

    def __len__(self) -> int:
        return len(self._headers) + bool(self._tail)

    def span(self, index: int) -> tuple[int, int]:
        """The first and the last seq of a block."""
        if index < len(self._headers):
            return self._headers[index].seq
        return self._tail[0].seq, self._tail[-1].seq

    def index_of(self, seq: int) -> int:
        """The block that holds this seq, or the first one after it; the number of blocks if there is none."""
        index = bisect_left(self._headers, seq, key=lambda header: header.seq[1])
        if index == len(self._headers) and (not self._tail or self._tail[-1].seq < seq):
            return len(self)
        return index

    def types(self, engine: str) -> list[str]:
        """The types of an engine's events."""
        return self._log.event_types(engine)

    def last_iteration(self, engine: str) -> int:
        """The iteration of the engine's last event; 0 if it has none."""
        parts = [header.engines.get(engine) for header in self._headers]
        reached = [part.iteration[1] for part in parts if part is not None]
        return max([0, *reached, *(event.iteration for event in self._tail if event.engine == engine)])

    def events(self, index: int, after: int = -1, upto: int | None = None) -> list[LoggedEvent]:
        """A block's events with after < seq <= upto."""
        kept = self._kept.get(index)
        if kept is None:
            kept = self._valid(self._log.block(index))
            for old in [each for each in self._kept if each < len(self._headers)][: 1 - KEPT]:
                del self._kept[old]
            self._kept[index] = kept
        if after < 0 and upto is None:
            return kept
        end = len(kept) if upto is None else bisect_right(kept, upto, key=_by_seq)
        return kept[bisect_right(kept, after, key=_by_seq) : end]

    def select(self, index: int, wanted: Mapping[str, Collection[str]]) -> list[LoggedEvent]:
        """A block's events that are wanted, by engine, and perhaps others.

        The lines are searched for the names of the wanted events, so that the other lines are not decoded. If most of
        a block is wanted, it is decoded as a whole, which is faster.
        """
        if index == len(self._headers):
            return self._tail
        header = self._headers[index]
        parts = header.engines
        types = {name for engine, part in parts.items() for name in wanted.get(engine, ()) if name in part.events}
        if not types:
            return []
        count = sum(part.events.get(name, 0) for part in parts.values() for name in types)
        if index in self._kept or len(types) > MOST_TYPES or 3 * count > header.count or "" in types:
            return self.events(index)
        lines = self._log.lines(index)
        if lines is None:
            return self.events(index)  # which reports the damage
        return self._valid(decode(_lines_of(lines, types)))

    def counts(self, index: int, engine: str, event: str) -> int | None:
        """How many of this event a block holds; None if the block has to be read for that."""
        if index == len(self._headers) or self._touches_superseded(index):
            return None
        part = self._headers[index].engines.get(engine)
        return part.events.get(event, 0) if part is not None else 0

    def may_hold(self, index: int, engine: str, events: Collection[str] | None) -> bool:
        """Whether a block may hold one of these events of the engine; None for any."""
        if index == len(self._headers):
            return True
        part = self._headers[index].engines.get(engine)
        return part is not None and (events is None or any(name in part.events for name in events))

    def _valid(self, events: list[LoggedEvent]) -> list[LoggedEvent]:
        if not self._superseded or not events:
            return events
        near = [(after, seam) for after, seam in self._superseded if after < events[-1].seq and events[0].seq < seam]
        if not near:
            return events
        return [
            e for e in events if e.seq in self._resumed_from or not any(after < e.seq < seam for after, seam in near)
        ]

    def _touches_superseded(self, index: int) -> bool:
        first, last = self.span(index)
        return any(after < last and first < seam for after, seam in self._superseded)


def _resumed_from(log: EventLog) -> Iterator[int]:
    """The seqs of the CHECKPOINT_SAVED of the checkpoints that the run has resumed from.

    A run returns to the place of the checkpoint, which comes before that event; but it counts it as saved.
    """
    for after, seam in log.superseded:
        saved = next(log.read(event=_SAVED, seq=(after + 1, seam - 1)), None) if after >= 0 else None
        if saved is None:
            continue
        resumed = next(log.read(engine=saved.engine, seq=(seam + 1, None)), None)
        # else a run that begins again, or a checkpoint whose event is not in the log
        if (
            resumed is not None
            and isinstance(saved.payload, dict)
            and saved.payload.get("iteration") == resumed.iteration
        ):
            yield saved.seq


def _lines_of(data: bytes, types: Collection[str]) -> bytes:
    """The lines that name one of the events, in order; a few do so in a field of a payload."""
    places: list[tuple[int, int]] = []
    find, rfind = data.find, data.rfind
    for name in types:
        needle = b'"event":%b' % msgspec.json.encode(name)
        at = find(needle)
        while at >= 0:
            end = find(b"\n", at)
            places.append((rfind(b"\n", 0, at) + 1, end))
            at = find(needle, end)
    if len(types) > 1:
        places = sorted(set(places))
    return b"\n".join([data[start:end] for start, end in places])


class Ahead:
    """The events that a replay plays next, read block by block."""

    next: int

    def __init__(self, source: Source) -> None:
        self._source = source
        self.events: deque[LoggedEvent] = deque()  # read and not played yet
        self.next = 0  # the first seq not read yet
        self.reads_all = False  # also events that nobody wants

    def first(self, wanted: Mapping[str, Collection[str]]) -> LoggedEvent | None:
        """The next event, and perhaps not one that is wanted; None at the end of the log."""
        source = self._source
        while not self.events:
            index = source.index_of(self.next)
            if index == len(source):
                return None
            start, last = source.span(index)
            events = source.events(index) if self.reads_all else source.select(index, wanted)
            self.events.extend(events if self.next <= start else [each for each in events if each.seq >= self.next])
            self.next = last + 1
        return self.events[0]

    def continue_at(self, seq: int) -> None:
        """Read from here on."""
        self.next = seq
        self.events.clear()


class Past:
    """What had happened before a position in the log; each answer starts from the previous one, if that was earlier."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._found: dict[object, tuple[int, LoggedEvent | None]] = {}
        self._counted: dict[tuple[str, str], tuple[int, int]] = {}

    def last(self, engine: str, events: frozenset[str] | None, seq: int) -> LoggedEvent | None:
        """The engine's last event, or the last of these events, up to this seq inclusive."""
        key = engine, events
        floor, found = self._found.get(key, (-1, None))
        if floor > seq:
            floor, found = -1, None
        source = self._source
        index = min(source.index_of(seq), len(source) - 1)
        newer: LoggedEvent | None = None
        while newer is None and index >= 0 and source.span(index)[1] > floor:
            if source.may_hold(index, engine, events):
                for event in reversed(source.events(index, floor, seq)):
                    if event.engine == engine and (events is None or event.event in events):
                        newer = event
                        break
            index -= 1
        self._found[key] = seq, newer or found
        return newer or found

    def count(self, engine: str, event: str, seq: int) -> int:
        """How many of this event the engine had fired up to this seq inclusive."""
        key = engine, event
        floor, number = self._counted.get(key, (-1, 0))
        if floor > seq:
            floor, number = -1, 0
        source = self._source
        for index in range(source.index_of(floor + 1), len(source)):
            first, last = source.span(index)
            if first > seq:
                break
            whole = source.counts(index, engine, event) if floor < first and last <= seq else None
            if whole is None and source.may_hold(index, engine, (event,)):
                part = source.events(index, floor, seq)
                whole = sum(1 for each in part if each.event == event and each.engine == engine)
            number += whole or 0
        self._counted[key] = seq, number
        return number

    def following(self, seq: int) -> Iterator[LoggedEvent]:
        """The events after this seq, one by one."""
        source = self._source
        for index in range(source.index_of(seq + 1), len(source)):
            yield from source.events(index, seq)
