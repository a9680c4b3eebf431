"""Files of lines that a killed run may have cut short, and that a full disk must leave whole."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.run_files.run_folder import replace_file

__all__ = ["Backlog", "drop_unfinished_line", "write_end"]

Line = TypeVar("Line")

_AT_MOST = 10_000  # lines that wait: a disk that stays full must not fill the memory
_AT_ONCE = 100  # lines of one writing: each new line is another try


class Backlog(Generic[Line]):
    """Lines that wait to be written, in their order; of more than 10,000 the oldest are lost, which is said once.

    Args:
        place: the logger's class name, for the message.
    """

    def __init__(self, place: str) -> None:
        self.lines: deque[Line] = deque()
        self._place = place
        self._said = False

    def put(self, line: Line) -> bool:
        """One more; returns whether the oldest was lost for it."""
        self.lines.append(line)
        if len(self.lines) <= _AT_MOST:
            return False
        self.lines.popleft()
        if not self._said:
            self._said = True
            get_logger("handlers").warning(
                f"{self._place}: more than {_AT_MOST:,} lines wait for the disk; the oldest are lost from now on"
            )
        return True

    def first(self) -> Sequence[Line]:
        """As many of them as are to be written at once."""
        return list(islice(self.lines, _AT_ONCE))

    def drop_first(self, count: int) -> None:
        """They are written."""
        for _ in range(count):
            self.lines.popleft()

    def cut(self, kept: int) -> None:
        """Take out all behind the first so many."""
        while len(self.lines) > kept:
            self.lines.pop()


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
