"""Files of lines that a killed run may have cut short, and that a full disk must leave whole."""

from __future__ import annotations

import os
from pathlib import Path

from engine.logs import get_logger
from handlers.run_folder import replace_file

__all__ = ["drop_unfinished_line", "write_end"]


def drop_unfinished_line(path: Path) -> None:
    """Take out a last line without an end, which a process killed in mid-write leaves; it is told."""
    content = path.read_bytes()
    if content.endswith(b"\n") or not content:
        return
    kept = content[: content.rfind(b"\n") + 1]
    get_logger("handlers").warning(
        f"{path.name} ended in an unfinished row; it was dropped",
        path=str(path),
        dropped=content[len(kept) :].decode(errors="replace"),
    )
    replace_file(path, kept)


def write_end(path: Path, content: bytes, replaced: bytes = b"") -> bool:
    """Write behind the file's end, or over an end that is as expected; on its way to the disk when this returns.

    Args:
        path: opened each time: such lines are rare, and nothing is left to close when a run ends badly.
        content: whole lines; not shorter than what they replace, so that one write does it.
        replaced: the end that the file has; where it is another one, nothing is replaced.

    Returns:
        Whether the end was replaced.

    Raises:
        OSError: the file is as it was.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)
        start = max(size - len(replaced), 0)
        os.lseek(descriptor, start, os.SEEK_SET)
        before = os.read(descriptor, size - start)
        if before != replaced:
            start, before = size, b""
        os.lseek(descriptor, start, os.SEEK_SET)
        try:
            _write(descriptor, content)
        except OSError:
            os.ftruncate(descriptor, start + len(before))  # no part of a line stays on a full disk
            os.lseek(descriptor, start, os.SEEK_SET)
            _write(descriptor, before)
            raise
        return bool(before)
    finally:
        os.close(descriptor)


def _write(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
