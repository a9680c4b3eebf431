"""Keeps a log within its budget: of old iterations' own events each hundredth stays, all other events do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from pulsetrain.engine.recording.log.blocks import BLOCK_EVENTS, Header, parse, seal, unpack
from pulsetrain.engine.recording.log.records import LoggedEvent, decode, encode
from pulsetrain.engine.recording.log.scan import FORMAT, mapped

__all__ = ["THINNED", "thin"]

THINNED = "log_thinned"  # the event that says so
_KEPT = 100  # each of so many iterations
_FREQUENT = frozenset(
    {
        "get_batch_started", "get_batch_completed", "iteration_started", "iteration_completed", "gradients_ready",
        "optimizer_step_completed",
    }
)  # fmt: skip


def thin(path: Path, target: Path, blocks: Sequence[tuple[int, Header]]) -> tuple[list[tuple[int, Header]], int]:
    """Write another sealed file in which the older half of the blocks that are whole is thinned; damage stays as it is.

    What is left of neighbouring blocks is put together.

    Args:
        path: the sealed file.
        target: the file that is written, and synced.
        blocks: offsets and headers of what the sealed file holds.

    Returns:
        The same of the file that was written, and how many events were taken out.

    Raises:
        OSError: it cannot be written.
    """
    data, taken = mapped(path), 0
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
            kept = [event for event in events if _stays(event)] if index in chosen else events
            taken += len(events) - len(kept)
            merged.add(header, kept or events[:1])
        merged.seal()
        file.flush()
        os.fsync(file.fileno())
    return merged.blocks, taken


class _Merged:
    """The blocks of the new file."""

    def __init__(self, file: BinaryIO) -> None:
        self.blocks: list[tuple[int, Header]] = []
        self._file = file
        self._events: list[LoggedEvent] = []
        self._headers: list[Header] = []  # of the blocks that these are left of

    def add(self, header: Header, events: Sequence[LoggedEvent]) -> None:
        """What is left of a block; one that begins with a seam begins a block here, too."""
        if header.seams or len(self._events) + len(events) > BLOCK_EVENTS:
            self.seal()
        self._events.extend(events)
        self._headers.append(header)

    def write(self, header: Header, content: bytes) -> None:
        """A block as it is."""
        self.seal()
        self.blocks.append((self._file.tell(), header))
        self._file.write(content)

    def seal(self) -> None:
        """Write what was added."""
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
        )
        self._events, self._headers = [], []
        self.write(header, content)


def _stays(event: LoggedEvent) -> bool:
    return event.event not in _FREQUENT or event.iteration % _KEPT == 0
