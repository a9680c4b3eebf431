"""Reads an event log, lazily and without ever changing it."""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import msgspec

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording.log.blocks import SEAM, Header, parse, seam_of, unpack
from pulsetrain.engine.recording.log.damage import (
    damage_inside,
    damage_of_another_run,
    damage_of_block,
    damage_of_record,
    find_damage,
)
from pulsetrain.engine.recording.log.files import NamedPath, log_files
from pulsetrain.engine.recording.log.query import Query, Range
from pulsetrain.engine.recording.log.records import LOST, LoggedEvent, decode, merge_measured
from pulsetrain.engine.recording.log.scan import Contents, Damage, mapped, recovered, scan
from pulsetrain.engine.recording.log.seams import in_force
from pulsetrain.engine.recording.log.tables import to_arrow, to_pandas
from pulsetrain.engine.recording.log.tail import written

if TYPE_CHECKING:
    import pandas
    import pyarrow

__all__ = ["EventLog", "ReadOptions", "logged_ranks", "read_ranks"]

_ATTEMPTS = 4  # to read a log that seems damaged: it may be being written
_LOG_FILE = re.compile(r"events(?:\.rank(\d+))?\.jsonl\.zst|tail(?:\.rank(\d+))?\.jsonl")


class ReadOptions(TypedDict, total=False):
    """The arguments of `EventLog.read`."""

    engine: str | None
    event: str | Collection[str] | None
    seq: Range
    iteration: Range
    epoch: Range
    where: Callable[[LoggedEvent], object] | None
    superseded: bool


class EventLog:
    """The events that a run has recorded.

    When a run resumes from a checkpoint, it computes the events after that checkpoint again. The earlier ones are
    superseded, and are left out by default. Damaged parts are skipped and listed in `damage`; damage inside a block is
    found when the block is read.

    >>> import tempfile
    >>> from pulsetrain.engine.recording import LogWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = LogWriter(Path(folder))
    ...     for i in range(3):
    ...         writer.add(LoggedEvent(ord=i, engine="trainer", event="iteration_completed", iteration=i + 1, seq=i))
    ...     log = EventLog(folder)
    ...     print(len(log), log.engines, [event.iteration for event in log.read(iteration=(2, None))])
    3 ['trainer'] [2, 3]

    Args:
        path: a run folder, or its folder `events`; messages call it what `str(path)` is.
        rank: the rank whose log to read.

    Raises:
        RecordingError: there is no log, or it has a newer format.
    """

    folder: Path
    label: Path

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        folder, label = Path(path), Path(str(path))
        self._sealed, self._tail = log_files(folder, rank)
        is_sealed = self._sealed.exists()
        if not is_sealed and (folder / "events").is_dir():
            folder, label = folder / "events", label / "events"
            self._sealed, self._tail = log_files(folder, rank)
            is_sealed = self._sealed.exists()
        self.folder, self._rank = folder, rank
        self.label = label  # what messages call the folder
        if not is_sealed and not self._tail.exists():
            if not Path(path).exists():
                raise RecordingError(f"{path}: does not exist; `pulsetrain runs` lists the runs below a folder")
            there = ", ".join(map(str, _ranks_in(folder)))
            raise RecordingError(
                f"{path}: has no log of rank {rank}; there are the logs of these ranks: {there}"
                if there
                else f"{path}: holds no event log; name a run folder with events/ in it, which an EventRecorder writes"
            )
        self.refresh()

    def refresh(self) -> None:
        """Read the files again: a run that has not ended may have written more."""
        for _ in range(_ATTEMPTS):
            self._open()
            if not self.damage:  # else the writer may have been writing just then
                break
        seams = [*self._index.seams, *(seam_of(event) for event in self._events if event.event == SEAM)]
        self._seams = [(after, seam) for seam, after, _ in seams]
        self._superseded = in_force(self._seams)
        self._read_losses()

    def _open(self) -> None:
        # the tail first: events sealed meanwhile are then in both files, never in neither
        tail = mapped(self._tail)
        lines = [line for line in written(bytes(tail)).lstrip(b"\n").split(b"\n") if line]
        self._data = mapped(self._sealed)
        found = recovered(lines)
        head = found.head
        self._contents: Contents = scan(
            self.label / self._sealed.name, self._data, head.run if head is not None else ""
        )
        self._index = self._contents.index
        found.drop_sealed(self._index.last_seq)
        self._events, self._run = found.events, head.run if head is not None else ""
        names = dict.fromkeys([*self._index.engines, *[event.engine for event in self._events]])
        self._engines = [name for name in names if name]
        self._closed = head is not None and head.ended and head.after == self._index.last_seq
        self.damage: list[Damage] = find_damage(self._sealed, self._data, self._contents, self._tail, found, len(tail))
        if not self._rank and self.folder.name == "events":  # other ranks may open a log before run.json is written
            other = damage_of_another_run(self._sealed, self.run_id, self.run_folder)
            self.damage.extend([other] if other is not None else [])
        self._recomputed: list[Damage] = []  # reported losses whose events a resumed run has computed again

    @property
    def rank(self) -> int:
        """The rank whose log it is."""
        return self._rank

    @property
    def run_folder(self) -> Path:
        """The run folder that the log is part of; the log's own folder if it is not called `events`."""
        return self.folder.parent if self.folder.name == "events" else self.folder

    @property
    def run(self) -> NamedPath:
        """The run folder, under the name by which messages call it."""
        return NamedPath(self.run_folder, str(self.label.parent if self.folder.name == "events" else self.label))

    @property
    def run_id(self) -> str:
        """The id of the run that wrote it; empty for a log of format 1."""
        return self._index.run or self._run

    @property
    def ended(self) -> bool:
        """Whether the log was closed. If not, the run has not ended, was killed, or the log's end is missing."""
        return (self._contents.ended or self._closed) and not self._events

    def __len__(self) -> int:
        """Number of events, superseded ones included."""
        return self._index.events + len(self._events)

    @property
    def engines(self) -> list[str]:
        """Names of the engines that published the events, in the order of their first ones."""
        return list(self._engines)

    def event_types(self, engine: str | None = None) -> list[str]:
        """The types of an engine's events, or of all engines', superseded ones included, in alphabetical order."""
        engines = self.engines if engine is None else [engine]
        parts = (header.engines[name] for header in self.headers for name in engines if name in header.engines)
        tail = (event.event for event in self._events if event.engine in engines)
        return sorted({kind for part in parts for kind in part.events}.union(tail))

    @property
    def main_engine(self) -> str:
        """The engine of the training run: "trainer", or the first in the log."""
        names = self._engines
        return "trainer" if "trainer" in names else (*names, "trainer")[0]

    def read(
        self,
        *,
        engine: str | None = None,
        event: str | Collection[str] | None = None,
        seq: Range = (None, None),
        iteration: Range = (None, None),
        epoch: Range = (None, None),
        where: Callable[[LoggedEvent], object] | None = None,
        superseded: bool = False,
    ) -> Iterator[LoggedEvent]:
        """Read events lazily, in the order of the bus.

        Args:
            engine: only events of this engine.
            event: only events of this type, or of these types, such as "iteration_completed".
            seq: first and last seq, both included.
            iteration: first and last iteration.
            epoch: first and last epoch.
            where: called with each event that passes the other conditions; returns whether to yield it.
            superseded: also yield events that a resumed run has computed again.
        """
        events = None if event is None else frozenset([event] if isinstance(event, str) else event)
        query = Query(engine, events, seq, iteration, epoch)
        for found in self._blocks(query):
            for each in found if query.everything else filter(query.wants, found):
                if each.observed is not None:
                    each = msgspec.structs.replace(each, payload=merge_measured(each.payload, each.observed))
                if not superseded and self._superseded and each.ord >= 0 and self.is_superseded(each.seq):
                    continue
                if where is None or where(each):
                    yield each

    def _blocks(self, query: Query) -> Iterator[list[LoggedEvent]]:
        for number in query.blocks(self._index):
            yield self.block(number)
        yield self._events

    def last(self, engine: str | None = None) -> LoggedEvent | None:
        """The newest event, of an engine or of any, superseded or not; None if none can be read."""
        blocks = (self.block(number) for number in reversed(range(len(self.headers))))
        events = (event for block in chain([self._events], blocks) for event in reversed(block))
        return next((event for event in events if engine in (None, event.engine)), None)

    def block(self, index: int, newest: int | None = None, lines: bytes | None = None) -> list[LoggedEvent]:
        """The events of one sealed block, superseded ones included; empty if it is damaged: see `damage`.

        Args:
            index: number of the block.
            newest: how many of its events to decode, from its end; by default all.
            lines: what `lines` has returned; by default they are read.
        """
        lines = self.lines(index) if lines is None else lines
        try:
            if lines is not None:
                return decode(lines if newest is None else _last_lines(lines, newest))
        except msgspec.DecodeError:  # although its checksum is right
            pass
        start, header = self._index.start[index], self._index.header(index)
        block = parse(self._data, start)
        end = block.end if block is not None else start + header.frame
        damage = damage_of_block(self._sealed, start, end, header)
        if damage not in self.damage:
            self.damage.append(damage)
        return []

    def lines(self, index: int) -> bytes | None:
        """The lines of one sealed block, each with its newline; None if it is damaged."""
        block = parse(self._data, self._index.start[index])
        return unpack(self._data, block) if block is not None and block.header == self._index.header(index) else None

    def attempts(self, after: int) -> list[tuple[int, int]]:
        """The first and last seq of each attempt after this seq: the original one, and each resume from there."""
        end = max([0, self._index.last_seq, *(event.seq for event in self._events)])
        seams = sorted((seam, before) for before, seam in self._seams if before <= after < seam)
        starts = [after + 1, *(seam + 1 for seam, before in seams if before == after)]
        ends = [seam - 1 for seam, _ in seams]
        return [(start, min([each for each in ends if each >= start], default=end)) for start in starts]

    def attempt(self, first: int, last: int) -> Iterator[LoggedEvent]:
        """The events of one attempt, without those superseded within it."""
        inside = in_force([(after, seam) for after, seam in self._seams if first <= seam <= last])
        for event in self.read(seq=(first, last), superseded=True):
            if event.ord < 0 or not any(after < event.seq < seam for after, seam in inside):
                yield event

    @property
    def headers(self) -> list[Header]:
        """The headers of the sealed blocks, in order."""
        return self._index.headers

    @property
    def superseded(self) -> list[tuple[int, int]]:
        """The ranges of seq, both ends excluded, whose deterministic events a resumed run has computed again."""
        return list(self._superseded)

    @property
    def tail(self) -> list[LoggedEvent]:
        """The events that are not sealed in a block yet."""
        return list(self._events)

    def verify(self) -> list[Damage]:
        """Read everything, and return the damaged and missing parts, even those that were computed again."""
        for number in range(len(self._index)):
            events = self.block(number)
            found = damage_inside(self._sealed, self._index.start[number], self._index.header(number), events)
            if found is not None and found not in self.damage:
                self.damage.append(found)
        return [*self.damage, *self._recomputed]

    def to_pandas(self, **query: Unpack[ReadOptions]) -> pandas.DataFrame:
        """A DataFrame with a row for each event, and a column for each value.

        See `pulsetrain.engine.recording.log.tables`.

        Args:
            query: as for `read`; the selected events must fit into memory.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        return to_pandas(self.read(**query))

    def to_arrow(self, **query: Unpack[ReadOptions]) -> pyarrow.Table:
        """A pyarrow.Table with a row for each event, and a column for each value.

        Args:
            query: as for `read`; the selected events must fit into memory.

        Raises:
            ConfigurationError: pyarrow is not installed.
        """
        return to_arrow(self.read(**query))

    def _read_losses(self) -> None:
        """List what the log itself reports as lost."""
        numbers = self._index.holding(LOST)
        for record in (each for events in (*map(self.block, numbers), self._events) for each in events):
            if record.event == LOST:
                lost = damage_of_record(self._sealed, record)
                again = any(after <= lost.after and record.seq < seam for after, seam in self._superseded)
                (self._recomputed if again else self.damage).append(lost)

    def is_superseded(self, seq: int) -> bool:
        """Whether a deterministic event of this seq has been computed again."""
        return bool(self._superseded) and any(after < seq < seam for after, seam in self._superseded)


def logged_ranks(path: str | os.PathLike[str]) -> list[int]:
    """The ranks that have a log in a run folder, or in its folder `events`; rank 0 if none has."""
    inside = Path(path, "events")
    return _ranks_in(inside if inside.is_dir() else path) or [0]


def _ranks_in(folder: str | os.PathLike[str]) -> list[int]:
    try:
        files = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted({int(match[1] or match[2] or 0) for file in files if (match := _LOG_FILE.fullmatch(file))})


def _last_lines(lines: bytes, count: int) -> bytes:
    """The last lines of text whose lines all end with a newline."""
    parts = lines.rsplit(b"\n", count + 1)
    return lines if len(parts) <= count + 1 else lines[len(parts[0]) + 1 :]


def read_ranks(path: str | os.PathLike[str], **query: Unpack[ReadOptions]) -> Iterator[tuple[int, LoggedEvent]]:
    """The events of every rank's log, each with its rank: by iteration, then by rank, then in recorded order.

    Events of other engines during an iteration, such as those of a validation, stay with that iteration.

    >>> import tempfile
    >>> from pulsetrain.engine.recording import LogWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for rank in (0, 1):
    ...         writer = LogWriter(Path(folder), rank)
    ...         for i in range(2):
    ...             writer.add(LoggedEvent(ord=i, engine="trainer", iteration=i + 1, seq=i))
    ...         writer.close()
    ...     [(event.iteration, rank) for rank, event in read_ranks(folder)]
    [(1, 0), (1, 1), (2, 0), (2, 1)]

    Args:
        path: a run folder, or its folder `events`.
        query: as for `EventLog.read`.

    Raises:
        RecordingError: there is no log, or one of them has a newer format.
    """
    logs = {rank: EventLog(path, rank) for rank in logged_ranks(path)}
    merged = heapq.merge(*(_keyed(rank, log, query) for rank, log in logs.items()), key=lambda item: item[0])
    return ((rank, event) for (*_, rank), event in merged)


def _keyed(rank: int, log: EventLog, query: ReadOptions) -> Iterator[tuple[tuple[int, int, int], LoggedEvent]]:
    main, runs, iteration = next(iter(log.engines), ""), 0, 0
    for event in log.read(**query):
        if event.engine == main:
            runs += event.iteration < iteration  # another run in the folder
            iteration = event.iteration
        yield (runs, iteration, rank), event
