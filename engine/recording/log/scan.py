"""Finds the blocks of a sealed file and the events of a tail, and the damaged parts of both."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording.log.blocks import BLOCK_MAGIC, Data, Header, find_next, parse
from pulsetrain.engine.recording.log.index import TABLE_MAGIC, Index
from pulsetrain.engine.recording.log.records import LoggedEvent, decode
from pulsetrain.engine.recording.log.tail import unchecked

__all__ = ["FORMAT", "Contents", "Damage", "mapped", "recovered", "scan"]

FORMAT = 1


@dataclass(frozen=True)
class Damage:
    """A part of a log's file that cannot be read.

    >>> print(Damage("events.jsonl.zst", 4096, 8192, "no whole block"))
    events.jsonl.zst, bytes 4096 to 8192: no whole block
    """

    file: str
    start: int  # bytes
    end: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, bytes {self.start} to {self.end}: {self.reason}"


@dataclass
class Contents:
    """The content of a sealed file."""

    index: Index = field(default_factory=Index.of_blocks)
    end: int = 0  # of the last whole block
    ended: bool = False  # it has a table: the log was closed
    damage: list[Damage] = field(default_factory=list)


def mapped(path: Path) -> Data:
    """The file's bytes, read on access; empty if the file is missing."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):  # ValueError: the file is empty
        return b""


def scan(path: Path, data: Data | None = None) -> Contents:
    """Find the blocks of a sealed file: by its table, or header by header if it has none.

    Args:
        data: the file's bytes, if they are already mapped.

    Raises:
        RecordingError: the log is of a newer format.
    """
    data = mapped(path) if data is None else data
    found = Index.of_table(data)
    if found is not None:
        index, start = found
        _check_format(path, index.version)
        return Contents(index, start, ended=True)
    contents, position = Contents(), 0
    blocks: list[tuple[int, Header]] = []
    while position < len(data):
        block = parse(data, position)
        if block is None:
            following = find_next(data, position + 1, (BLOCK_MAGIC, TABLE_MAGIC))
            reason = "no whole block" if following < len(data) else "cut off in the middle of a block"
            contents.damage.append(Damage(path.name, position, following, reason))
            position = following
            continue
        _check_format(path, block.header.v)
        blocks.append((block.start, block.header))
        position = contents.end = block.end
    contents.index = Index.of_blocks(blocks)
    return contents


def _check_format(path: Path, version: int) -> None:
    if version > FORMAT:
        raise RecordingError(
            f"{path}: has format {version}, and this version reads up to {FORMAT}; read it with a newer pulsetrain"
        )


def recovered(lines: Sequence[bytes], after: int) -> tuple[list[LoggedEvent], int]:
    """The events of a tail's lines that are not sealed yet, in the order of seq, and the number of damaged lines.

    Args:
        after: the last sealed seq.
    """
    events: dict[int, LoggedEvent] = {}
    torn = 0
    for line in lines:
        whole = unchecked(line)
        try:
            event = decode(whole)[0] if whole is not None else None
        except (msgspec.DecodeError, IndexError):
            event = None
        if event is None:
            torn += 1
        elif event.seq > after and (event.seq not in events or events[event.seq].open):
            events[event.seq] = event
    return [events[seq] for seq in sorted(events)], torn
