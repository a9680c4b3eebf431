"""Finds the blocks of a sealed file and the events of a tail, and the damaged parts of both."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording.log.blocks import BLOCK_MAGIC, Data, Header, find_next, parse
from pulsetrain.engine.recording.log.files import open_descriptor, read_descriptor
from pulsetrain.engine.recording.log.index import TABLE_MAGIC, Index
from pulsetrain.engine.recording.log.records import LoggedEvent, decode, encode
from pulsetrain.engine.recording.log.tail import unchecked

__all__ = [
    "FORMAT",
    "HEAD",
    "Contents",
    "Damage",
    "Recovered",
    "TailHead",
    "check_format",
    "mapped",
    "recovered",
    "scan",
]

FORMAT = 2
HEAD = "log_tail"  # the event of a tail's first line
_SMALL = 1 << 17  # bytes up to which a file is read in less time than it is mapped


@dataclass(frozen=True)
class Damage:
    """A part of a log that cannot be read, or is missing.

    >>> print(Damage("events.jsonl.zst", 4096, 8192, "no whole block"))
    events.jsonl.zst, bytes 4096 to 8192: no whole block
    """

    file: str
    start: int  # bytes
    end: int
    reason: str
    after: int = field(default=-1, compare=False)  # seq of the last event that is certainly before it

    def __str__(self) -> str:
        where = f", bytes {self.start} to {self.end}" if self.end else ""
        return f"{self.file}{where}: {self.reason}"


@dataclass
class Contents:
    """The content of a sealed file."""

    index: Index = field(default_factory=Index.of_blocks)
    end: int = 0  # of the last whole block
    ended: bool = False  # it has a table: the log was closed
    damage: list[Damage] = field(default_factory=list)


class TailHead(msgspec.Struct, frozen=True):
    """The first line of a tail, by which lost parts of the log are noticed.

    >>> TailHead.of_line(TailHead(run="a", after=7, ord=5).line())
    TailHead(run='a', after=7, ord=5, ended=False)
    """

    run: str  # its id
    after: int  # seq of the last sealed event; -1 for none
    ord: int  # of the next deterministic event
    ended: bool = False  # the log was closed

    def line(self) -> bytes:
        """The line without its checksum."""
        return encode(LoggedEvent(event=HEAD, payload=msgspec.to_builtins(self)))

    @classmethod
    def of_line(cls, line: bytes) -> Self | None:
        """The head that a line holds; None for another line."""
        (event,) = decode(line)
        return msgspec.convert(event.payload, cls) if event.event == HEAD else None


@dataclass
class Recovered:
    """The content of a tail."""

    events: list[LoggedEvent]  # in the order of seq
    torn: list[bytes]  # damaged lines
    head: TailHead | None  # None if it is lost, and in a log of format 1

    def drop_sealed(self, last: int) -> None:
        """Forget the events up to a seq: they are in the sealed file."""
        self.events = [event for event in self.events if event.seq > last]


def mapped(path: Path) -> Data:
    """The file's bytes, read on access unless there are few; empty if the file is missing.

    Raises:
        RecordingError: it cannot be read, for example because it is a folder.
    """
    try:
        descriptor, size = open_descriptor(path)
        try:
            if size > _SMALL:
                with suppress(OSError):  # a file system whose files cannot be mapped
                    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            return read_descriptor(descriptor, size)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return b""
    except OSError as error:
        rule = (
            f"cannot be read ({error.strerror or error}); an event log has a file there: restore it, or move that away"
        )
        raise RecordingError(f"{path}: {rule}") from error


def scan(path: Path, data: Data | None = None, run: str = "") -> Contents:
    """Find the blocks of a sealed file: by its table, or header by header if it has none.

    Args:
        data: the file's bytes, if they are already mapped.
        run: the run's id; blocks of another one are damage. By default that of the first block.

    Raises:
        RecordingError: the log is of a newer format.
    """
    data = mapped(path) if data is None else data
    found = Index.of_table(data)
    if found is not None:
        index, start = found
        check_format(path, index.version)
        return Contents(index, start, ended=True)
    contents, position = Contents(), 0
    blocks: list[tuple[int, Header]] = []
    while position < len(data):
        block = parse(data, position)
        if block is None:
            following = find_next(data, position + 1, (BLOCK_MAGIC, TABLE_MAGIC))
            reason = "no whole block" if following < len(data) else "cut off in the middle of a block"
            contents.damage.append(
                Damage(path.name, position, following, reason, blocks[-1][1].seq[1] if blocks else -1)
            )
            position = following
            continue
        header = block.header
        check_format(path, header.v)
        run = run or header.run
        if header.run and header.run != run:
            contents.damage.append(Damage(path.name, block.start, block.end, f"a block of another run, {header.run}"))
        else:
            blocks.append((block.start, header))
            contents.end = block.end
        position = block.end
    contents.index = Index.of_blocks(blocks)
    return contents


def check_format(path: Path, version: int) -> None:
    """Raise if the log at this path is of a newer format.

    Raises:
        RecordingError: it is.
    """
    if version > FORMAT:
        raise RecordingError(
            f"{path}: has format {version}, and this version reads up to {FORMAT}; read it with a newer pulsetrain"
        )


def recovered(lines: Sequence[bytes]) -> Recovered:
    """Decode a tail's lines.

    Args:
        lines: as they are in the file.
    """
    events: dict[int, LoggedEvent] = {}
    found = Recovered([], [], None)
    wholes = [unchecked(line) for line in lines]
    decoded = iter(_decoded([whole for whole in wholes if whole is not None]))
    for line, whole in zip(lines, wholes, strict=True):
        event = next(decoded) if whole is not None else None
        try:
            if whole is not None and event is not None and event.event == HEAD:
                found.head = TailHead.of_line(whole)  # a tail that was being replaced may hold two: the last one counts
                continue
        except (msgspec.DecodeError, msgspec.ValidationError):
            event = None
        if event is None:
            found.torn.append(line)
        elif event.seq not in events or events[event.seq].open:
            events[event.seq] = event
    found.events = [events[seq] for seq in sorted(events)]
    return found


def _decoded(lines: Sequence[bytes]) -> Sequence[LoggedEvent | None]:
    """The event of each line; None for a line that has none. All together take half the time of one by one."""
    with suppress(msgspec.DecodeError, msgspec.ValidationError):
        events = decode(b"\n".join(lines))
        if len(events) == len(lines):
            return events
    return [_decoded([line])[0] for line in lines] if len(lines) > 1 else [None] * len(lines)
