"""The files of an event log."""

from __future__ import annotations

from pathlib import Path

__all__ = ["log_files"]


def log_files(folder: Path, rank: int = 0) -> tuple[Path, Path]:
    """The sealed file and the tail of a rank's log.

    >>> [file.name for file in log_files(Path("runs/a/events"), rank=1)]
    ['events.rank1.jsonl.zst', 'tail.rank1.jsonl']
    """
    middle = f".rank{rank}" if rank else ""
    return folder / f"events{middle}.jsonl.zst", folder / f"tail{middle}.jsonl"
