"""Keeps a log within its budget: of old iterations' own events each hundredth stays, all other events do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from engine.errors import RecordingError
from engine.recording.blocks import Header, parse, seal, unpack
from engine.recording.lines import LoggedEvent, decode, encode
from engine.recording.scan import FORMAT, mapped

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
    """Write another sealed file in which the older half of the blocks is thinned.

    Args:
        path: the sealed file.
        target: the file that is written, and synced.
        blocks: offsets and headers of what the sealed file holds.

    Returns:
        The same of the file that was written, and how many events were taken out.

    Raises:
        OSError: it cannot be written.
    """
    data, made, taken = mapped(path), list[tuple[int, Header]](), 0
    with target.open("wb") as file:
        for index, (start, header) in enumerate(blocks):
            block = parse(data, start)
            if block is None:
                raise RecordingError(f"{path}: the block at byte {start} is damaged; the log is not thinned")
            content = data[block.start : block.end]
            if index < len(blocks) // 2 and not header.thinned:
                lines = unpack(data, block)
                events = decode(lines) if lines is not None else []
                kept = [event for event in events if _stays(event)] or events[:1]
                if len(kept) < len(events):
                    taken += len(events) - len(kept)
                    header, content = seal(
                        FORMAT,
                        kept,
                        [encode(event) for event in kept],
                        header.after,
                        len(events) - len(kept),
                        header.seq,
                    )
            made.append((file.tell(), header))
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return made, taken


def _stays(event: LoggedEvent) -> bool:
    return event.event not in _FREQUENT or event.iteration % _KEPT == 0
