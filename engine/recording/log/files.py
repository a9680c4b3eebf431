"""The files of an event log, and paths that messages call by another name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NamedPath", "log_files"]


@dataclass(frozen=True)
class NamedPath(os.PathLike[str]):
    """A path that `str` calls by another name, such as that of the archive which a folder was unpacked from.

    >>> run = NamedPath(Path("/tmp/x/a"), "a.run.zip")
    >>> str(run), Path(run).as_posix()
    ('a.run.zip', '/tmp/x/a')
    """

    path: Path
    name: str

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return self.name


def log_files(folder: Path, rank: int = 0) -> tuple[Path, Path]:
    """The sealed file and the tail of a rank's log.

    >>> [file.name for file in log_files(Path("runs/a/events"), rank=1)]
    ['events.rank1.jsonl.zst', 'tail.rank1.jsonl']
    """
    middle = f".rank{rank}" if rank else ""
    return folder / f"events{middle}.jsonl.zst", folder / f"tail{middle}.jsonl"
