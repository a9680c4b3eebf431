"""Writes an event log: each line into the tail immediately, full blocks into the sealed file."""

from __future__ import annotations

import os
import time
import uuid
import weakref
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.file_lock import lock, unlock
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording.log.blocks import BLOCK_BYTES, BLOCK_EVENTS, SEAM, Data, Header, seal, seam_of
from pulsetrain.engine.recording.log.damage import find_damage
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.engine.recording.log.index import Index
from pulsetrain.engine.recording.log.records import ENCODING_ERRORS, LOST, LoggedEvent, encode, encoded
from pulsetrain.engine.recording.log.scan import FORMAT, Contents, Damage, Recovered, TailHead, mapped, recovered, scan
from pulsetrain.engine.recording.log.tail import Tail
from pulsetrain.engine.recording.log.thinning import THINNED, thin

__all__ = ["LogWriter"]


def _unwritable(folder: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"event log {folder}: cannot be written ({error.strerror or error}); choose another folder, make room on its "
        "disk, or fix its permissions"
    )


_OPEN: weakref.WeakSet[LogWriter] = weakref.WeakSet()


def _leave_logs() -> None:
    """In a forked process, such as a loader's worker, which would write into the logs and hold their locks."""
    for writer in list(_OPEN):
        writer.leave()


os.register_at_fork(after_in_child=_leave_logs)

_KEPT_IN_MEMORY = 64 * BLOCK_EVENTS


class LogWriter:
    """Appends events to the log in a folder.

    When `add` returns, the line is in the tail, which survives the process. A block is sealed when `ord` reaches a
    multiple of 1024 and all events of the block are complete, or at `end`.

    >>> import tempfile
    >>> from pulsetrain.engine.recording import EventLog
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = LogWriter(Path(folder))
    ...     writer.add(LoggedEvent(ord=0, engine="trainer", event="started", seq=0, t=time.time_ns()))
    ...     writer.end()
    ...     writer.close()
    ...     print([event.event for event in EventLog(folder).read()], EventLog(folder).ended)
    ['started'] True

    Args:
        folder: created if it is missing.
        rank: rank of this process; each rank writes its own log.
        max_bytes: budget of the sealed file: when it is exceeded, the per-iteration events of old iterations are
            thinned, and an event `log_thinned` reports it.
        run: the run's id, for a new log; by default a new one.

    Raises:
        RunFolderError: another process writes this log, or the folder cannot be written.
        RecordingError: the log has a newer format.
    """

    path: Path
    run: str
    cut_off: bool
    last_seq: int
    next_ord: int

    def __init__(self, folder: Path, rank: int = 0, max_bytes: int | None = None, run: str = "") -> None:
        self.path, tail = log_files(folder, rank)
        self.run = run
        self._max_bytes = max_bytes
        self._thins_above = max_bytes  # larger than the budget once nothing is left to remove
        self._unsealed: list[LoggedEvent] = []
        self._lines: list[bytes] = []  # of the unsealed events
        self._open: dict[int, int] = {}  # seq -> index in both lists, of events that are not complete
        self._cuts: list[int] = []  # where blocks end in both lists
        self._bytes = 0  # of the lines of the current block
        self._headers: list[tuple[int, Header]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _unwritable(folder, error) from error
        if lock(self._descriptor) is False:
            os.close(self._descriptor)
            raise RunFolderError(
                f"event log {folder}: another recorder is writing it; detach that one first, or choose another folder"
            )
        try:
            size = tail.stat().st_size if tail.exists() else 0
            self._tail = Tail(tail)
            self._append_to(tail, size)
        except BaseException as error:
            os.close(self._descriptor)
            if isinstance(error, OSError):
                raise _unwritable(folder, error) from error
            raise
        _OPEN.add(self)

    def _append_to(self, tail: Path, size: int) -> None:
        """Continue after the existing blocks: drop what a crash left unfinished, and adopt the tail's events.

        Args:
            tail: the tail's path.
            size: its size in bytes when it was found.
        """
        lines, data = self._tail.lines(), mapped(self.path)
        found = recovered(lines)
        head = found.head
        contents = scan(self.path, data, head.run if head is not None else "")
        index = contents.index
        found.drop_sealed(index.last_seq)
        is_new = not lines and not len(data)
        damage = [] if is_new else find_damage(self.path, data, contents, tail, found, size)
        self.run = (head.run if head is not None else "") or index.run or self.run or uuid.uuid4().hex
        self._headers = [*zip(index.start, index.headers, strict=True)]
        self._end = contents.end
        # a head that knows of later blocks keeps it visible that they are missing
        self._after = max(index.last_seq, head.after if head is not None else -1)
        events = found.events
        self.cut_off = not contents.ended or bool(events)  # the existing log was not closed; also true if it is empty
        self._unsealed = events
        self._lines = [encode(event) for event in events]
        self.last_seq = max([self._after, *(event.seq for event in events)])
        self.next_ord = head.ord if head is not None and head.after >= index.last_seq else index.next_ord or 0
        for event in events:
            if event.ord >= 0:
                self.next_ord = event.ord + 1
            elif event.event == SEAM:
                self.next_ord = event.payload["ord"]
        self._bound_block(max(self.next_ord - 1, 0))
        kept = self._keep_aside(data, contents, found) if damage else []
        self._replace_tail(erase=True)
        os.ftruncate(self._descriptor, self._end)  # a table: from now on the log is open
        # no later reader would notice it: the tail is rewritten, and a block's header has only its first and last ord
        if kept or any(each.file == tail.name for each in damage) or (damage and found.head is None):
            self._note_loss(damage, kept)

    def _keep_aside(self, data: Data, contents: Contents, found: Recovered) -> list[str]:
        """Copy damaged bytes that continuing the log will overwrite to files beside it; returns their names."""
        kept = []
        for name, content in (
            (self.path.name, bytes(data[contents.end :]) if not contents.ended else b""),
            (self._tail.path.name, b"\n".join(found.torn)),
        ):
            if content:
                numbers = (self.path.with_name(f"{name}.damaged-{number}") for number in count(1))
                target = next(each for each in numbers if not each.exists())
                target.write_bytes(content)
                kept.append(target.name)
        return kept

    def _note_loss(self, damage: Sequence[Damage], kept: Sequence[str]) -> None:
        reason = "; ".join(map(str, damage))
        where = "what cannot be read is kept in other files, and " if kept else ""
        get_logger("engine").warning(
            f"the event log is damaged: {where}the log continues without what is missing", damage=reason, kept=kept
        )
        payload = {"reason": reason, "after": min(each.after for each in damage), "kept": kept}
        self.add(LoggedEvent(event=LOST, payload=payload, seq=self.last_seq + 1, t=time.time_ns()))

    def lose(self, seq: int, ord: int, reason: str, t: int) -> None:
        """Note that the events up to this seq are not in the log, although they were written once.

        Args:
            seq: of the last one.
            ord: of the next deterministic event.
            reason: what is lost, and how that is known.
            t: time of the record, nanoseconds since 1970.

        Raises:
            OSError: as `rewind`.
        """
        payload = {"reason": reason, "after": self.last_seq, "up_to": seq, "ord": [self.next_ord, ord - 1]}
        self.next_ord = ord
        self.add(LoggedEvent(event=LOST, payload=payload, seq=seq + 1, t=t))

    @property
    def seams(self) -> list[tuple[int, int, int]]:
        """Where a resumed or rewound run continues: seq, `after` and `ord` of each seam."""
        sealed = [seam for _, header in self._headers for seam in header.seams]
        return [*sealed, *(seam_of(event) for event in self._unsealed if event.event == SEAM)]

    def restore_seams(self, seams: Iterable[tuple[int, int, int]], t: int) -> None:
        """Write seams again that the log has lost: what is left of the events that they supersede does not count.

        Args:
            seams: that were in the log once.
            t: time of the records, nanoseconds since 1970.

        Raises:
            OSError: as `rewind`.
        """
        there, failed = set(self.seams), None
        for seq, after, ord in seams:
            if (seq, after, ord) not in there:
                payload = {"after": after, "ord": ord, "seq": seq}
                self.next_ord = min(self.next_ord, ord)
                try:
                    self.add(LoggedEvent(event=SEAM, payload=payload, seq=self.last_seq + 1, t=t))
                except OSError as error:  # the record waits in memory, and so do the others
                    failed = error
        if failed is not None:
            raise failed

    def begin_at(self, ord: int) -> None:
        """Give the next deterministic event of an empty log this `ord`: the run began in another log."""
        self.next_ord = ord
        self._replace_tail()

    def _replace_tail(self, *, ended: bool = False, erase: bool = False) -> None:
        first = next((event for event in self._unsealed if event.ord >= 0 or event.event == SEAM), None)
        ord = self.next_ord if first is None else first.ord if first.ord >= 0 else first.payload["ord"]
        head = TailHead(run=self.run, after=self._after, ord=ord, ended=ended)
        self._tail.replace([head.line(), *self._lines], erase=erase)

    @property
    def events(self) -> int:
        """Number of events in the log."""
        return sum(header.count for _, header in self._headers) + len(self._unsealed)

    @property
    def files(self) -> tuple[Path, Path]:
        """The sealed file and the tail."""
        return self.path, self._tail.path

    @property
    def nbytes(self) -> int:
        """Size of the sealed file."""
        return self._end

    def add(self, event: LoggedEvent) -> None:
        """Write an event; one that is `open` is completed later. If its seq is already used, it gets the next one.

        Raises:
            RecordingError: the event holds a value that JSON cannot.
            OSError: the disk is full; the log is unchanged, or has the event in its tail.
        """
        try:
            line = encoded(event)
        except ENCODING_ERRORS:
            line = encode(event)  # raises again, and names the event
        if event.seq <= self.last_seq:
            event.seq = self.last_seq + 1  # a record of the writer itself has used its seq
            line = encode(event)
        if event.open:
            self._open[event.seq] = len(self._unsealed)
        self.append(event, line)

    def append(self, event: LoggedEvent, line: bytes) -> None:
        """Write an event whose line has been encoded; its seq is larger than `last_seq`.

        Raises:
            OSError: as `add`.
        """
        ord = event.ord
        begins = not self._first <= ord < self._next and ord >= 0  # else it belongs to the current block
        if begins:
            self._bound_block(ord)
        size = self._bytes = self._bytes + len(line)
        if begins or size > BLOCK_BYTES:
            begins = True
            self._bytes = len(line)
            if self._unsealed:
                self._cuts.append(len(self._unsealed))
        self._unsealed.append(event)
        self._lines.append(line)
        self.last_seq = event.seq
        try:
            self._tail.append(line)
            if begins:
                self._seal_complete()
        except OSError:
            self._drop_oldest()
            raise

    def _drop_oldest(self) -> None:
        """Bound memory while the disk stays full: an event `log_lost` replaces the oldest events, but for seams."""
        excess = len(self._unsealed) - _KEPT_IN_MEMORY
        if excess <= 0:
            return
        cut = excess + BLOCK_EVENTS
        while self._unsealed[cut - 1].event == SEAM:  # whose seq would be that of `log_lost`
            cut += 1
        seams = [number for number in range(cut) if self._unsealed[number].event == SEAM]
        payload = {"events": cut - len(seams), "after": self._unsealed[0].seq - 1}
        lost = LoggedEvent(event=LOST, payload=payload, seq=self._unsealed[cut - 1].seq, t=time.time_ns())
        before = next((event for event in self._unsealed[:cut] if event.event == LOST), None)
        if before is not None:
            payload["events"] += before.payload.get("events", 1) - 1
            payload["after"] = min(payload["after"], before.payload.get("after", -1))
        self._lines[:cut] = [*(self._lines[number] for number in seams), encode(lost)]
        self._unsealed[:cut] = [*(self._unsealed[number] for number in seams), lost]
        moved = cut - len(seams) - 1
        self._cuts = [each - moved for each in self._cuts if each > cut]
        self._open = {seq: index - moved for seq, index in self._open.items() if index >= cut}

    def complete(self, event: LoggedEvent) -> None:
        """Write an open event again, now that it is complete."""
        event.open = False
        index = self._open.pop(event.seq, None)
        if index is None:  # it was sealed incomplete
            return
        line = encode(event)
        self._lines[index] = line
        self._tail.append(line)
        if self._cuts:
            self._seal_complete()

    def update(self, event: LoggedEvent) -> None:
        """Write the fields of an open event that are known so far."""
        index = self._open.get(event.seq)
        if index is None:  # it was sealed incomplete, or lost on a full disk
            return
        self._lines[index] = line = encode(event)
        self._tail.append(line)

    def rewind(self, after: int, ord: int, seq: int, t: int) -> None:
        """Mark that the run resumes from a checkpoint: the events after `after` are superseded.

        Args:
            after: seq of the last event before the checkpoint.
            ord: ord of the next deterministic event.
            seq: seq of the record that marks the seam.
            t: time of that record, nanoseconds since 1970.

        Raises:
            OSError: the disk is full; the record is kept in memory, and the next event gets this `ord` all the same.
        """
        try:
            self.seal()
        finally:  # on a full disk, too: the record waits in memory with what could not be sealed
            self.next_ord = ord
            self._bound_block(ord)
            self.add(LoggedEvent(event=SEAM, payload={"after": after, "ord": ord}, seq=seq, t=t))

    def seal(self) -> None:
        """Seal all events; those still open are sealed incomplete.

        Raises:
            OSError: the disk is full; the log is unchanged.
        """
        if self._unsealed:
            self._open.clear()
            self._cuts = [*[cut for cut in self._cuts if cut < len(self._unsealed)], len(self._unsealed)]
            self._seal_complete()

    def end(self) -> None:
        """Seal everything and mark the log as ended; an event added later removes that mark.

        Raises:
            OSError: the disk is full; the log is unchanged.
        """
        self.seal()
        if self._unsealed:  # the log was thinned, which an event reports
            self._thins_above = None
            self.seal()
        self._write(Index.of_blocks(self._headers).table(FORMAT), keep=False)
        self._replace_tail(ended=True)

    def close(self) -> None:
        """Close the files and release the lock; call `end` first if the run has ended."""
        if self._descriptor >= 0:
            unlock(self._descriptor)
        self.leave()

    def leave(self) -> None:
        """Close the files and keep the lock, in a forked process, which has copies of them: it can write nothing."""
        _OPEN.discard(self)
        self._tail.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _bound_block(self, ord: int) -> None:
        self._first = ord // BLOCK_EVENTS * BLOCK_EVENTS
        self._next = self._first + BLOCK_EVENTS

    def _seal_complete(self) -> None:
        while self._cuts and (not self._open or min(self._open.values()) >= self._cuts[0]):
            cut = self._cuts[0]
            header, block = seal(FORMAT, self._unsealed[:cut], self._lines[:cut], self._after, run=self.run)
            start = self._end
            self._write(block)
            self._headers.append((start, header))
            self._after = header.seq[1]
            del self._unsealed[:cut], self._lines[:cut]
            self._cuts = [each - cut for each in self._cuts[1:]]
            self._open = {seq: index - cut for seq, index in self._open.items()}
            self._replace_tail()
        if self._thins_above is not None and self._end > self._thins_above:
            self._thin()

    def _thin(self) -> None:
        target = self.path.with_name(f".{self.path.name}.thinned")
        headers, removed = thin(self.path, target, self._headers)
        if target.stat().st_size >= self._end:
            target.unlink()
            self._thins_above = self._end + self._end // 4  # by then there are new events that can be removed
            get_logger("engine").warning(
                "the event log exceeds its budget, and nothing is left in it to thin",
                bytes=self._end,
                max_bytes=self._max_bytes,
            )
            return
        self._thins_above = self._max_bytes
        descriptor = os.open(target, os.O_RDWR | os.O_CLOEXEC)
        lock(descriptor)  # before the rename: no other writer can be first
        os.replace(target, self.path)
        os.close(self._descriptor)
        self._descriptor, self._headers = descriptor, headers
        self._end = os.fstat(descriptor).st_size
        if removed:
            up_to = max(header.seq[1] for _, header in headers if header.thinned)
            payload = {"events": removed, "up_to_seq": up_to}
            self.add(LoggedEvent(event=THINNED, payload=payload, seq=self.last_seq + 1, t=time.time_ns()))

    def _write(self, data: bytes, *, keep: bool = True) -> None:
        """Append to the sealed file, over its table if it has one."""
        os.ftruncate(self._descriptor, self._end)
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], self._end + done)
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            raise
        if keep:
            self._end += len(data)
