"""Keeps a log within its budget: of the per-iteration events of old iterations, 1 in 100 is kept; of others, all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from pulsetrain.engine.recording.log.blocks import BLOCK_EVENTS, Header, parse, seal, unpack
from pulsetrain.engine.recording.log.records import LoggedEvent, decode, encode
from pulsetrain.engine.recording.log.scan import FORMAT, mapped

__all__ = ["FREQUENT", "THINNED", "thin"]

THINNED = "log_thinned"  # the event that reports it
_KEPT = 100  # per-iteration events are kept for multiples of this
FREQUENT = frozenset(  # the events of each iteration
    {
        "get_batch_started", "get_batch_completed", "iteration_started", "iteration_completed", "gradients_ready",
        "optimizer_step_completed",
    }
)  # fmt: skip


def thin(path: Path, target: Path, blocks: Sequence[tuple[int, Header]]) -> tuple[list[tuple[int, Header]], int]:
    """Write a sealed file in which the older half of the blocks is thinned; damaged ones are copied as they are.

    The remaining events of neighbouring blocks are merged.

    Args:
        path: the sealed file.
        target: the file to write and sync.
        blocks: offsets and headers of the sealed file's blocks.

    Returns:
        Offsets and headers of the written file's blocks, and the number of removed events.

    Raises:
        OSError: `target` cannot be written.
    """
    data, removed = mapped(path), 0
    whole = [index for index, (_, header) in enumerate(blocks) if not header.thinned]
    chosen = frozenset(whole[: len(whole) // 2])
    with target.open("wb") as file:
        merged = _Merged(file)
        for index, (start, header) in enumerate(blocks):
            block = parse(data, start)
            lines = unpack(data, block) if block is not None and (header.thinned or index in chosen) else None
            if lines is None:
                following = blocks[index + 1][0] if index + 1 < len(blocks) else None
                merged.write(header, data[start : block.end if block is not None else following])
                continue
            events = decode(lines)
            kept = [event for event in events if _is_kept(event)] if index in chosen else events
            removed += len(events) - len(kept)
            merged.add(header, kept or events[:1])
        merged.seal()
        file.flush()
        os.fsync(file.fileno())
    return merged.blocks, removed


class _Merged:
    """Writes the blocks of the new file."""

    def __init__(self, file: BinaryIO) -> None:
        self.blocks: list[tuple[int, Header]] = []
        self._file = file
        self._events: list[LoggedEvent] = []
        self._headers: list[Header] = []  # of the blocks that these come from

    def add(self, header: Header, events: Sequence[LoggedEvent]) -> None:
        """Add the remaining events of a block; a block that begins with a seam also begins a new one."""
        if header.seams or len(self._events) + len(events) > BLOCK_EVENTS:
            self.seal()
        self._events.extend(events)
        self._headers.append(header)

    def write(self, header: Header, content: bytes) -> None:
        """Copy a block as it is."""
        self.seal()
        self.blocks.append((self._file.tell(), header))
        self._file.write(content)

    def seal(self) -> None:
        """Write the added events as one block."""
        if not self._headers:
            return
        first, last = self._headers[0], self._headers[-1]
        held = sum(header.count + header.thinned for header in self._headers)
        header, content = seal(
            FORMAT,
            self._events,
            [encode(event) for event in self._events],
            first.after,
            held - len(self._events),
            (first.seq[0], last.seq[1]),
            last.run,
        )
        self._events, self._headers = [], []
        self.write(header, content)


def _is_kept(event: LoggedEvent) -> bool:
    return event.event not in FREQUENT or event.iteration % _KEPT == 0
