"""Writes an event log: lines into the tail at once, full blocks into the sealed file."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path

from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording.log.blocks import BLOCK_EVENTS, SEAM, Header, seal
from pulsetrain.engine.recording.log.index import Index
from pulsetrain.engine.recording.log.records import NO_PLAIN_VALUE, LoggedEvent, encode, encoded
from pulsetrain.engine.recording.log.scan import FORMAT, Contents, recovered, scan
from pulsetrain.engine.recording.log.tail import Tail
from pulsetrain.engine.recording.log.thinning import THINNED, thin

__all__ = ["LogWriter", "log_files"]


def log_files(folder: Path, rank: int = 0) -> tuple[Path, Path]:
    """The sealed file and the tail of a rank's log."""
    middle = f".rank{rank}" if rank else ""
    return folder / f"events{middle}.jsonl.zst", folder / f"tail{middle}.jsonl"


_OPEN: weakref.WeakSet[LogWriter] = weakref.WeakSet()


def _let_go_of_locks() -> None:
    """In a forked process, such as a loader's worker: else it holds the logs' locks for as long as it lives."""
    for writer in list(_OPEN):
        writer.let_go()


os.register_at_fork(after_in_child=_let_go_of_locks)

LOST = "log_lost"  # the event that says that events could not be written
_KEPT_IN_MEMORY = 64 * BLOCK_EVENTS


class LogWriter:
    """Appends events to the log in a folder, going on with one that is there.

    A line is in the tail, which outlives the process, when `add` returns. A block is sealed when `ord` comes to a
    multiple of 1024 and all its events are complete, or at `end`.

    Args:
        folder: made where it is not there.
        rank: of this process; each writes a log of its own.
        max_bytes: budget of the sealed file: where it is reached, old iterations' own events are thinned, and an event
            `log_thinned` says so.

    Raises:
        RunFolderError: another process writes this log, or the folder cannot be written.
        RecordingError: the log is of a newer format.
    """

    def __init__(self, folder: Path, rank: int = 0, max_bytes: int | None = None) -> None:
        self.path, tail = log_files(folder, rank)
        self._max_bytes = max_bytes
        self._thins_above = max_bytes  # more than the budget where nothing is left to be taken out
        self._unsealed: list[LoggedEvent] = []
        self._lines: list[bytes] = []  # of these
        self._open: dict[int, int] = {}  # seq -> index in both of those that are not complete
        self._cuts: list[int] = []  # where blocks end in both
        self._headers: list[tuple[int, Header]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RunFolderError(
                f"event log {folder}: cannot be written ({error.strerror or error}); "
                "choose another folder or mend its permissions"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise RunFolderError(
                f"event log {folder}: another recorder writes it; detach that one first, or choose another folder"
            ) from None
        try:
            contents = scan(self.path)
            self._tail = Tail(tail)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._go_on(contents)
        _OPEN.add(self)

    def _go_on(self, contents: Contents) -> None:
        """Behind what is there: cut off what a crash has left unfinished, and take the tail's events over."""
        index = contents.index
        self._headers = [(index.start(number), header) for number, header in enumerate(index.headers)]
        self._end = contents.end
        self._after = index.last_seq
        events, torn = recovered(self._tail.lines(), self._after)
        if torn:
            get_logger("engine").warning("the event log's tail holds lines that are not whole", lines=torn)
        self.cut_off = not contents.ended or bool(events)  # what is there was not closed; nothing may be there
        self._unsealed = events
        self._lines = [encode(event) for event in events]
        self.last_seq = max([self._after, *(event.seq for event in events)])
        self.next_ord = index.next_ord or 0
        for event in events:
            if event.ord >= 0:
                self.next_ord = event.ord + 1
            elif event.event == SEAM:
                self.next_ord = event.payload["ord"]
        self._bound_block(max(self.next_ord - 1, 0))

    @property
    def events(self) -> int:
        """How many the log holds."""
        return sum(header.count for _, header in self._headers) + len(self._unsealed)

    @property
    def nbytes(self) -> int:
        """Of the sealed file."""
        return self._end

    def add(self, event: LoggedEvent) -> None:
        """Write an event; one that is `open` is completed later. Where its seq has been taken it gets the next one.

        Raises:
            RecordingError: it holds what is no plain value.
            OSError: the disk is full; the log is as it was, or holds the event in its tail.
        """
        try:
            line = encoded(event)
        except NO_PLAIN_VALUE:
            line = encode(event)  # raises, too, and says which event it is
        if event.seq <= self.last_seq:
            event.seq = self.last_seq + 1  # the writer's own record came between
            line = encode(event)
        ord = event.ord
        begins = not self._first <= ord < self._next and ord >= 0  # else it is of the block under way
        if begins:
            self._bound_block(ord)
            if self._unsealed:
                self._cuts.append(len(self._unsealed))
        if event.open:
            self._open[event.seq] = len(self._unsealed)
        self._unsealed.append(event)
        self._lines.append(line)
        self.last_seq = event.seq
        try:
            self._tail.append(line)
            if begins:
                self._seal_complete()
        except OSError:
            self._forget_the_oldest()
            raise

    def _forget_the_oldest(self) -> None:
        """On a disk that stays full memory must not fill up as well: what is lost is said in the log."""
        excess = len(self._unsealed) - _KEPT_IN_MEMORY
        if excess <= 0:
            return
        cut = excess + BLOCK_EVENTS
        said = LoggedEvent(event=LOST, payload={"events": cut}, seq=self._unsealed[cut - 1].seq, t=time.time_ns())
        before = next((event for event in self._unsealed[:cut] if event.event == LOST), None)
        if before is not None:
            said.payload["events"] += before.payload["events"] - 1
        self._unsealed[:cut], self._lines[:cut] = [said], [encode(said)]
        moved = cut - 1
        self._cuts = [each - moved for each in self._cuts if each > cut]
        self._open = {seq: index - moved for seq, index in self._open.items() if index >= cut}

    def complete(self, event: LoggedEvent) -> None:
        """Write an open event again, which is whole now."""
        event.open = False
        index = self._open.pop(event.seq, None)
        if index is None:  # sealed as it was
            return
        line = encode(event)
        self._lines[index] = line
        self._tail.append(line)
        if self._cuts:
            self._seal_complete()

    def update(self, event: LoggedEvent) -> None:
        """Write what is known by now of an open event; more follows."""
        index = self._open.get(event.seq)
        if index is None:  # sealed as it was, or lost on a full disk
            return
        self._lines[index] = line = encode(event)
        self._tail.append(line)

    def rewind(self, after: int, ord: int, seq: int, t: int) -> None:
        """A run goes on from a checkpoint: the events behind `after` come again, the next one's ord is `ord`.

        Args:
            after: seq of the last event before the checkpoint.
            ord: of the first event behind it.
            seq: of the record that marks the seam.
            t: when that is.
        """
        self.seal()
        self.add(LoggedEvent(event=SEAM, payload={"after": after, "ord": ord}, seq=seq, t=t))
        self.next_ord = ord
        self._bound_block(ord)

    def seal(self) -> None:
        """Seal what is complete; events that are still open are sealed as they are.

        Raises:
            OSError: the disk is full; the log is as it was.
        """
        if self._unsealed:
            self._open.clear()
            self._cuts = [*[cut for cut in self._cuts if cut < len(self._unsealed)], len(self._unsealed)]
            self._seal_complete()

    def end(self) -> None:
        """Seal everything, and say that this is the end; what is added nevertheless takes that back.

        Raises:
            OSError: the disk is full; the log is as it was.
        """
        self.seal()
        if self._unsealed:  # it was thinned, and says so
            self._thins_above = None
            self.seal()
        self._write(Index(self._headers).table(FORMAT), keep=False)

    def close(self) -> None:
        """Give the files back; `end` comes before."""
        _OPEN.discard(self)
        self._tail.close()
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a process that was forked just now may hold it, too
        os.close(self._descriptor)

    def let_go(self) -> None:
        """Give the lock back in a process that has inherited this; it writes nothing there."""
        os.close(self._descriptor)
        self._descriptor = -1

    def _bound_block(self, ord: int) -> None:
        self._first = ord // BLOCK_EVENTS * BLOCK_EVENTS
        self._next = self._first + BLOCK_EVENTS

    def _seal_complete(self) -> None:
        while self._cuts and (not self._open or min(self._open.values()) >= self._cuts[0]):
            cut = self._cuts[0]
            header, block = seal(FORMAT, self._unsealed[:cut], self._lines[:cut], self._after)
            start = self._end
            self._write(block)
            self._headers.append((start, header))
            self._after = header.seq[1]
            del self._unsealed[:cut], self._lines[:cut]
            self._cuts = [each - cut for each in self._cuts[1:]]
            self._open = {seq: index - cut for seq, index in self._open.items()}
            self._tail.replace(self._lines)
        if self._thins_above is not None and self._end > self._thins_above:
            self._thin()

    def _thin(self) -> None:
        target = self.path.with_name(f".{self.path.name}.thinned")
        headers, taken = thin(self.path, target, self._headers)
        if target.stat().st_size >= self._end:
            target.unlink()
            self._thins_above = self._end + self._end // 4  # until then more has come that can be
            get_logger("engine").warning(
                "the event log has outgrown its budget, and nothing in it can be thinned",
                bytes=self._end,
                max_bytes=self._max_bytes,
            )
            return
        self._thins_above = self._max_bytes
        descriptor = os.open(target, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before the name is its: nobody else has seen it
        os.replace(target, self.path)
        os.close(self._descriptor)
        self._descriptor, self._headers = descriptor, headers
        self._end = os.fstat(descriptor).st_size
        if taken:
            up_to = max(header.seq[1] for _, header in headers if header.thinned)
            said = LoggedEvent(event=THINNED, payload={"events": taken, "up_to_seq": up_to})
            said.seq, said.t = self.last_seq + 1, time.time_ns()
            self.add(said)

    def _write(self, data: bytes, *, keep: bool = True) -> None:
        """Append to the sealed file, over a table that was there."""
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
