"""Reads an event log, lazily and without ever changing it."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording.log.blocks import SEAM, Header, parse, seam_of, unpack
from pulsetrain.engine.recording.log.index import Index, Reach
from pulsetrain.engine.recording.log.records import LoggedEvent, decode, merged
from pulsetrain.engine.recording.log.scan import Contents, Damage, mapped, recovered, scan
from pulsetrain.engine.recording.log.tables import to_arrow, to_pandas
from pulsetrain.engine.recording.log.writer import LOST, log_files

__all__ = ["EventLog", "read_ranks"]

_LOOKS = 4  # at a log that seems damaged, and is perhaps being written
_RANK_FILE = re.compile(r"events\.rank(\d+)\.jsonl\.zst")

Range = tuple[int | None, int | None]  # first and last, both included; None for no bound


class EventLog:
    """The events that a run has recorded.

    Events that a resumed run has computed again are left out, unless they are asked for: those of the first time are
    superseded. Damage is passed over and listed in `damage`; reading a block finds out about its own.

    Args:
        path: a run folder, or its folder `events`.
        rank: whose log, where several processes have recorded.

    Raises:
        RecordingError: there is no log, or it is of a newer format.
    """

    def __init__(self, path: str | Path, rank: int = 0) -> None:
        folder = Path(path)
        if not log_files(folder, rank)[0].exists() and (folder / "events").is_dir():
            folder = folder / "events"
        self.folder = folder
        self._sealed, self._tail = log_files(folder, rank)
        if not self._sealed.exists() and not self._tail.exists():
            raise RecordingError(
                f"{path}: holds no event log, which an EventRecorder writes; name a run folder with events/ in it"
            )
        self.refresh()

    def refresh(self) -> None:
        """Look at the files anew: a run that is still going has written more."""
        for _ in range(_LOOKS):
            self._look()
            if not self.damage:  # else the writer may have been at it
                break
        self._superseded = self._find_superseded()

    def _look(self) -> None:
        # the tail first: what is sealed in between is then in both, and never in neither
        tail = mapped(self._tail)
        content = bytes(tail).rstrip(b"\n\0")  # most of it are empty lines
        lines = [line for line in content.split(b"\n") if line.strip(b"\0")]
        self._data = mapped(self._sealed)
        self._contents: Contents = scan(self._sealed, self._data)
        self._index = self._contents.index
        self._events, torn = recovered(lines, self._index.last_seq)
        self.damage: list[Damage] = list(self._contents.damage)
        if torn:
            self.damage.append(Damage(self._tail.name, 0, len(tail), f"{torn} lines are not whole"))
        self._check_for_gaps(tail_is_whole=not torn)

    @property
    def ended(self) -> bool:
        """Whether the log was closed: else the run is still going, was killed, or the end is missing."""
        return self._contents.ended and not self._events

    def __len__(self) -> int:
        """How many events it holds, superseded ones among them."""
        return self._index.events + len(self._events)

    @property
    def engines(self) -> list[str]:
        """Names of the engines whose events it holds, in the order in which they came."""
        names = dict.fromkeys([*self._index.engines, *(event.engine for event in self._events)])
        return [name for name in names if name]

    @property
    def main_engine(self) -> str:
        """The engine whose run it is: "trainer", or the first in the log."""
        names = self.engines
        return "trainer" if "trainer" in names else (*names, "trainer")[0]

    def read(
        self,
        *,
        engine: str | None = None,
        event: str | Collection[str] | None = None,
        seq: Range = (None, None),
        iteration: Range = (None, None),
        epoch: Range = (None, None),
        where: Callable[[LoggedEvent], Any] | None = None,
        superseded: bool = False,
    ) -> Iterator[LoggedEvent]:
        """The events in the order of the bus, read as they are asked for.

        Args:
            engine: those of this one alone.
            event: those of this type, or of these, such as "iteration_completed".
            seq: from and to this place in the bus's order.
            iteration: from and to this one.
            epoch: from and to this one.
            where: called with each event that is left, says whether it is wanted.
            superseded: also those that a resumed run has computed again.
        """
        events = None if event is None else frozenset([event] if isinstance(event, str) else event)
        query = _Query(engine, events, seq, iteration, epoch)
        for found in self._blocks(query):
            for each in found if query.everything else filter(query.wants, found):
                if each.observed is not None:
                    each = msgspec.structs.replace(each, payload=merged(each.payload, each.observed))
                if not superseded and self._superseded and each.ord >= 0 and self.is_superseded(each.seq):
                    continue
                if where is None or where(each):
                    yield each

    def _blocks(self, query: _Query) -> Iterator[list[LoggedEvent]]:
        for number in query.blocks(self._index):
            yield self.block(number)
        yield self._events

    def block(self, index: int) -> list[LoggedEvent]:
        """The events of one sealed block, superseded ones too; none where it is damaged, which is listed then."""
        lines = self.lines(index)
        events: list[LoggedEvent] | None = None
        if lines is not None:
            try:
                events = decode(lines)
            except msgspec.DecodeError:  # its checksum holds, so it was written so
                pass
        if events is None:
            start, header = self._index.start(index), self._index.header(index)
            block = parse(self._data, start)
            damage = Damage(
                self._sealed.name,
                start,
                block.end if block is not None else start + header.frame,
                f"{header.count} events, seq {header.seq[0]} to {header.seq[1]}",
            )
            if damage not in self.damage:
                self.damage.append(damage)
            return []
        return events

    def lines(self, index: int) -> bytes | None:
        """The lines of one sealed block, each with its newline; None where it is damaged."""
        block = parse(self._data, self._index.start(index))
        return unpack(self._data, block) if block is not None and block.header == self._index.header(index) else None

    def attempts(self, after: int) -> list[tuple[int, int]]:
        """The first and last seq of each time that the run went on behind this seq: at first, and resumed there."""
        end = max([0, self._index.last_seq, *(event.seq for event in self._events)])
        seams = sorted((seam, before) for before, seam in self._superseded if before <= after < seam)
        starts = [after + 1, *(seam + 1 for seam, before in seams if before == after)]
        ends = [seam - 1 for seam, _ in seams]
        return [(start, min([each for each in ends if each >= start], default=end)) for start in starts]

    def attempt(self, first: int, last: int) -> Iterator[LoggedEvent]:
        """The events of one attempt, those left out that were computed again within it."""
        inside = [(after, seam) for after, seam in self._superseded if first <= seam <= last]
        for event in self.read(seq=(first, last), superseded=True):
            if event.ord < 0 or not any(after < event.seq < seam for after, seam in inside):
                yield event

    @property
    def headers(self) -> list[Header]:
        """What each sealed block holds, in order."""
        return self._index.headers

    @property
    def superseded(self) -> list[tuple[int, int]]:
        """The ranges of seq, both ends left out, whose deterministic events a resumed run has computed again."""
        return list(self._superseded)

    @property
    def tail(self) -> list[LoggedEvent]:
        """The events that are in no block yet."""
        return list(self._events)

    def verify(self) -> list[Damage]:
        """Read everything; what cannot be read, or is missing."""
        for number in range(len(self._index)):
            self.block(number)
        return self.damage

    def to_pandas(self, **query: Any) -> Any:
        """A DataFrame with a row for each event, and a column for each value.

        See `pulsetrain.engine.recording.log.tables`.

        Args:
            query: as for `read`; all that it gives is in memory then.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        return to_pandas(self.read(**query))

    def to_arrow(self, **query: Any) -> Any:
        """A pyarrow.Table likewise.

        Raises:
            ConfigurationError: pyarrow is not installed.
        """
        return to_arrow(self.read(**query))

    def _check_for_gaps(self, *, tail_is_whole: bool) -> None:
        for number, before, after in self._index.gaps():
            block = parse(self._data, self._index.start(number - 1)) if number else None
            reason = f"the events behind seq {before} are missing, up to seq {after}"
            self.damage.append(Damage(self._sealed.name, block.end if block else 0, self._index.start(number), reason))
        expected = self._index.next_ord
        for event in self._events if tail_is_whole else ():
            if event.event == SEAM:
                expected = event.payload["ord"]
            elif event.event == LOST:
                expected = None
            elif event.ord >= 0:
                if expected is not None and event.ord != expected:
                    reason = f"the events before seq {event.seq} are missing: ord {expected} to {event.ord - 1}"
                    self.damage.append(Damage(self._tail.name, 0, 0, reason))
                expected = event.ord + 1

    def _find_superseded(self) -> list[tuple[int, int]]:
        """The ranges of seq that were computed again, both ends left out."""
        seams = [*self._index.seams]
        seams += [seam_of(event) for event in self._events if event.event == SEAM]
        return [(after, seam) for seam, after, _ in seams]

    def is_superseded(self, seq: int) -> bool:
        """Whether a deterministic event of this seq has been computed again."""
        return any(after < seq < seam for after, seam in self._superseded)


def read_ranks(path: str | Path, **query: Any) -> Iterator[tuple[int, LoggedEvent]]:
    """The events of every rank's log, each with its rank: by iteration, then by rank, then as each recorded them.

    What is fired by other engines while an iteration lasts, such as a validation's events, stays with that iteration.

    Args:
        path: a run folder, or its folder `events`.
        query: as for `EventLog.read`.

    Raises:
        RecordingError: there is no log, or one is of a newer format.
    """
    folder = Path(path)
    folder = folder / "events" if (folder / "events").is_dir() else folder
    files = folder.iterdir() if folder.is_dir() else ()
    ranks = {int(match[1]) for file in files if (match := _RANK_FILE.fullmatch(file.name))}
    if not ranks or any(file.exists() for file in log_files(folder)):
        ranks.add(0)
    logs = {rank: EventLog(folder, rank) for rank in sorted(ranks)}
    merged = heapq.merge(*(_placed(rank, log, query) for rank, log in logs.items()), key=lambda item: item[0])
    return ((rank, event) for (*_, rank), event in merged)


def _placed(rank: int, log: EventLog, query: dict[str, Any]) -> Iterator[tuple[tuple[int, int, int], LoggedEvent]]:
    main, runs, iteration = next(iter(log.engines), ""), 0, 0
    for event in log.read(**query):
        if event.engine == main:
            runs += event.iteration < iteration  # another run in the folder
            iteration = event.iteration
        yield (runs, iteration, rank), event


_UNBOUNDED: Range = (None, None)


class _Query:
    """Which events are wanted, and which blocks may hold one."""

    def __init__(
        self, engine: str | None, events: frozenset[str] | None, seq: Range, iteration: Range, epoch: Range
    ) -> None:
        self.engine, self.events = engine, events
        self.seq, self.iteration, self.epoch = seq, iteration, epoch
        self.everything = engine is None and events is None and seq == iteration == epoch == _UNBOUNDED

    def wants(self, event: LoggedEvent) -> bool:
        return (
            (self.engine is None or event.engine == self.engine)
            and (self.events is None or event.event in self.events)
            and _inside(event.seq, self.seq)
            and _inside(event.iteration, self.iteration)
            and _inside(event.epoch, self.epoch)
        )

    def blocks(self, index: Index) -> Iterable[int]:
        """The numbers of those that may hold one; found from the lists over all blocks, as far as these go."""
        near = index.between(self.seq)
        if self.engine is None and self.iteration == self.epoch == _UNBOUNDED:
            found: Iterable[int] = near
        else:
            engines = index.engines if self.engine is None else [self.engine]
            reaches = [reach for engine in engines if (reach := index.reach(engine)) is not None]
            found = sorted({number for reach in reaches for number in self._reached(reach, near)})
        return (number for number in found if self._names(index.header(number))) if self.events is not None else found

    def _reached(self, reach: Reach, near: range) -> Iterator[int]:
        (first, last), (first_epoch, last_epoch) = reach.iteration, reach.epoch
        for number in near:
            if (
                last[number] >= 0
                and _overlap((first[number], last[number]), self.iteration)
                and _overlap((first_epoch[number], last_epoch[number]), self.epoch)
            ):
                yield number

    def _names(self, header: Header) -> bool:
        """Whether the block holds one of the events that are wanted; those of the engine, where one is named."""
        parts = header.engines.values() if self.engine is None else [header.engines[self.engine]]
        return any(not self.events.isdisjoint(part.events) for part in parts)  # type: ignore[union-attr]


def _inside(value: int, bounds: Range) -> bool:
    low, high = bounds
    return (low is None or value >= low) and (high is None or value <= high)


def _overlap(held: tuple[int, int], bounds: Range) -> bool:
    low, high = bounds
    return (low is None or held[1] >= low) and (high is None or held[0] <= high)
