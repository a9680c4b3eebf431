"""The files of an event log, how they are opened, and paths that messages call by another name."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = ["NamedPath", "log_files", "open_descriptor", "open_file", "read_file"]


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


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. Nobody is waited for: a pipe or a device in its place is an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     os.mkfifo(Path(folder, "run.json"))
    ...     open_file(Path(folder, "run.json"))
    Traceback (most recent call last):
        ...
    OSError: [Errno 22] is a pipe or a device, not a file: '...run.json'

    Raises:
        OSError: it cannot be opened, or is not a file.
    """
    return os.fdopen(open_descriptor(path)[0], "rb")


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a file, in half the time that `open_file` takes with it.

    Raises:
        OSError: it cannot be read, or is not a file.
    """
    descriptor, size = open_descriptor(path)
    try:
        return read_descriptor(descriptor, size)
    finally:
        os.close(descriptor)


def read_descriptor(descriptor: int, size: int) -> bytes:
    """What follows in an open file, about so many bytes."""
    content = os.read(descriptor, size + 1)
    while more := os.read(descriptor, 1 << 20):
        content += more
    return content


def open_descriptor(path: str | os.PathLike[str]) -> tuple[int, int]:
    """A descriptor that reads a file, which the caller closes, and the file's size. See `open_file`.

    Raises:
        OSError: it cannot be opened, or is not a file.
    """
    name = os.fspath(path)
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        raise OSError(errno.EINVAL, "is a pipe or a device, not a file", name)
    return descriptor, status.st_size
