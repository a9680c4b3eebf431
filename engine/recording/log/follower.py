"""Follows a log that is being written: each reading takes only what is new in its files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pulsetrain.engine.recording.log.blocks import (
    BLOCK_MAGIC,
    SEAM,
    Block,
    Data,
    content_at,
    find_next,
    parse,
    seam_of,
    unpack,
)
from pulsetrain.engine.recording.log.damage import damage_of_block
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.engine.recording.log.index import TABLE_MAGIC
from pulsetrain.engine.recording.log.records import LoggedEvent, decode, merge_measured
from pulsetrain.engine.recording.log.scan import Damage, check_format, mapped, scan
from pulsetrain.engine.recording.log.seams import in_force
from pulsetrain.engine.recording.log.tail_follower import TailFollower

__all__ = ["LogFollower"]


class LogFollower:
    """The events of one rank's log, as they come.

    An event is returned once its receivers have returned and its values are known, which may be after events that
    began later: `unfinished` has those that are still open. Superseded events are left out. If a resumed run supersedes
    events that were returned before, or another run writes the log, reading begins again, and `generation` grows: the
    caller discards what it has made of the events so far.

    >>> import tempfile
    >>> from pulsetrain.engine.recording.log.writer import LogWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer, log = LogWriter(Path(folder)), LogFollower(Path(folder))
    ...     for seq in range(2):
    ...         writer.add(LoggedEvent(ord=seq, engine="trainer", event="epoch_started", epoch=seq + 1, seq=seq))
    ...         print([event.epoch for event in log.read()])
    [1]
    [2]

    Args:
        folder: the folder of the log's files, which may not exist yet.
        rank: the rank whose log to follow.
        recent: begin with this number of the newest blocks; by default with the first.
        label: what messages call the folder.
    """

    folder: Path
    rank: int
    run: str

    def __init__(self, folder: Path, rank: int = 0, recent: int | None = None, *, label: Path | None = None) -> None:
        self.folder, self.rank = folder, rank
        self.generation: int = 0
        self._recent = recent
        self._path, tail = log_files(folder, rank)
        self._label = (label or folder) / self._path.name
        self._tail = TailFollower(tail)
        self._begin()

    def _begin(self) -> None:
        """Forget what was read."""
        self.run = ""  # id of the run that writes the log; "" if it is not known
        self.damage: list[Damage] = []  # that was found while reading
        self._is_open = False  # whether there is a log of which something was read
        self._file: tuple[int, int, int] | None = None  # device, number and size of the sealed file
        self._offset = 0  # in that file, of the next block
        self._sealed = -1  # seq of the last event in the blocks before
        self._is_closed = False  # the writer has closed the log
        self._is_complete = False  # everything that is sealed was read
        self._waiting: dict[int, LoggedEvent] = {}  # events of the tail that were not returned, by seq
        self._returned: set[int] = set()  # seqs of events of the tail that were returned and are not sealed yet
        self._seams: list[tuple[int, int]] = []
        self._superseded: list[tuple[int, int]] = []
        self._last = -1  # greatest seq of a deterministic event that was returned
        self._tail.restart()

    @property
    def exists(self) -> bool:
        """Whether the log has a file."""
        return self._path.exists() or self._tail.path.exists()

    @property
    def ended(self) -> bool:
        """Whether the log was closed, and everything in it was read."""
        head = self._tail.head
        is_closed = self._is_closed or (head is not None and head.ended and head.after == self._sealed)
        return is_closed and self._is_complete and not self._waiting

    @property
    def share(self) -> float:
        """The part of the log that has been read, from 0 to 1."""
        if self._is_complete or self._file is None or not self._file[2]:
            return 1.0
        return min(self._offset / self._file[2], 1.0)

    @property
    def unfinished(self) -> list[LoggedEvent]:
        """The newest events whose receivers have not returned, or whose values are not known yet."""
        return [self._waiting[seq] for seq in sorted(self._waiting)] if self._is_complete else []

    def finish(self) -> list[LoggedEvent]:
        """Return the unfinished events as they are: the process that would complete them was killed."""
        found = self.unfinished
        if found:
            self._returned.update(self._waiting)
            self._waiting.clear()
        return self._counted(found)

    def read(self, seconds: float | None = None) -> list[LoggedEvent]:
        """The events that are new; empty if there are none.

        Args:
            seconds: return after about this time, although there may be more; `share` then is below 1.

        Raises:
            RecordingError: the log has a newer format, or a file cannot be read.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        if not self._is_open:
            self._open()
        if not self._is_open or not self.exists:  # it may have been deleted, or its disk may be away
            return []
        for event in self._lines():
            before = self._waiting.get(event.seq)
            if event.seq > self._sealed and event.seq not in self._returned and (before is None or before.open):
                self._waiting[event.seq] = event
        found = list(self._of_blocks(deadline))
        if self._is_complete:
            complete = sorted(seq for seq, event in self._waiting.items() if not event.open)
            found += [self._waiting.pop(seq) for seq in complete]
            self._returned.update(complete)
        if self._is_rewound(found):
            self.restart()
            return self.read(None if deadline is None else deadline - time.monotonic())
        return self._counted(found)

    def _counted(self, events: list[LoggedEvent]) -> list[LoggedEvent]:
        """Those that are not superseded, as `EventLog.read` returns them."""
        found = []
        for event in events:
            if event.ord >= 0:
                if any(after < event.seq < seam for after, seam in self._superseded):
                    continue
                self._last = max(self._last, event.seq)
            if event.observed is not None:
                payload = merge_measured(event.payload, event.observed)
                event = msgspec.structs.replace(event, payload=payload)
            found.append(event)
        return found

    def _is_rewound(self, events: list[LoggedEvent]) -> bool:
        """Whether one of these events changes which events count among those returned before."""
        known = set(self._seams)
        seams = ((after, seam) for seam, after, _ in (seam_of(each) for each in events if each.event == SEAM))
        new = [each for each in seams if each not in known]
        if not new:
            return False
        before = self._superseded
        self._seams += new
        self._superseded = in_force(self._seams)
        changed = set(before) ^ set(self._superseded)
        return any(after < self._last for after, _ in changed)

    def restart(self) -> None:
        """Return everything again."""
        self.generation += 1
        self._begin()
        self._open()

    def _lines(self) -> list[LoggedEvent]:
        """The new events of the tail; afterwards, `_file` says what the sealed file is.

        The tail comes first: events that are sealed meanwhile are then in both files, never in neither.
        """
        found = self._tail.read()
        now, before = _identity(self._path), self._file
        is_other = self._is_other_run()
        if not is_other and before is not None and now != before:
            is_replaced = now is None or now[:2] != before[:2] or now[2] < self._offset
            is_other = is_replaced and not self._was_thinned()
        if is_other:
            self.restart()
            found, now = self._tail.read(), _identity(self._path)
        self._file = now
        return found

    def _open(self) -> None:
        if not self.exists:
            return
        self._is_open = True
        seams = [seam_of(event) for event in self._tail.read() if event.event == SEAM]
        head = self._tail.head
        self._tail.restart()
        contents = scan(self._label, mapped(self._path), head.run if head is not None else "")
        index = contents.index
        self.run = head.run if head is not None else index.run
        self._seams = [(after, seam) for seam, after, _ in (*index.seams, *seams)]
        self._superseded = in_force(self._seams)
        if self._recent is not None and len(index) > self._recent:
            number = len(index) - self._recent
            self._offset, self._sealed = index.start[number], index.seq[1][number - 1]

    def _is_other_run(self) -> bool:
        """Whether another run writes the log now."""
        head = self._tail.head
        return head is not None and self.run != "" and head.run != self.run

    def _was_thinned(self) -> bool:
        """Whether the sealed file was replaced by a thinned one of the same log; if so, continue in that."""
        contents = scan(self._label, mapped(self._path), self.run)
        index = contents.index
        if not self.run or index.run != self.run or index.last_seq < self._sealed:
            return False
        following = index.between((self._sealed + 1, None))
        self._offset = index.start[following[0]] if following else contents.end
        return True

    def _of_blocks(self, deadline: float | None) -> Iterator[LoggedEvent]:
        """The events of new blocks."""
        self._is_complete = True
        if self._file is None or (self._file[2] == self._offset and not self._is_closed):
            return
        data = mapped(self._path)
        while (block := self._next(data)) is not None:
            yield from self._events(data, block)
            if deadline is not None and time.monotonic() > deadline and self._offset < len(data):
                self._is_complete = False
                return

    def _next(self, data: Data) -> Block | None:
        """The next block; None if there is none yet."""
        self._is_closed = False
        while self._offset < len(data):
            block = parse(data, self._offset)
            if block is None and content_at(data, self._offset, TABLE_MAGIC) is not None:
                self._is_closed = True
                return None
            if block is None:
                following = find_next(data, self._offset + 1, (BLOCK_MAGIC, TABLE_MAGIC))
                if following == len(data):  # it is being written, or was when the process was killed
                    return None
                self.damage.append(Damage(self._path.name, self._offset, following, "no whole block", self._sealed))
                self._offset = following
                continue
            check_format(self._label, block.header.v)
            return block
        return None

    def _events(self, data: Data, block: Block) -> list[LoggedEvent]:
        """The events of a block that were not returned."""
        header = block.header
        self._offset = block.end
        if header.run and self.run and header.run != self.run:
            reason = f"a block of another run, {header.run}"
            self.damage.append(Damage(self._path.name, block.start, block.end, reason))
            return []
        sealed, self._sealed = self._sealed, max(self._sealed, header.seq[1])
        returned = {seq for seq in self._returned if seq <= header.seq[1]}
        self._returned -= returned
        for seq in [seq for seq in self._waiting if seq <= header.seq[1]]:
            del self._waiting[seq]
        lines = unpack(data, block)
        try:
            events = decode(lines) if lines is not None else None
        except msgspec.DecodeError:  # although its checksum is right
            events = None
        if events is None:
            self.damage.append(damage_of_block(self._path, block.start, block.end, header))
            return []
        return [event for event in events if event.seq > sealed and event.seq not in returned]


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Device, number and size of a file; None if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size
