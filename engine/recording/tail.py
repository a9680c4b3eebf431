"""The open end of a log: a text file in memory that survives the process.

It is mapped, so that writing a line costs no call to the operating system, and what was written is there when the
process is killed. It is filled with newlines first: a text tool sees empty lines, and a full disk shows when
the file grows, not when it is written.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

__all__ = ["Tail"]

_FIRST = 1 << 16  # bytes
_BLANK = b"\n" * (1 << 16)


class Tail:
    """The lines that are not sealed yet, in the order in which they were written.

    Args:
        path: made where it is not there; what it holds stays.

    Raises:
        OSError: it cannot be made, or the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.end = 0  # where the next line goes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._map: mmap.mmap | None = None
            size = os.fstat(self._descriptor).st_size
            self._grow(max(size, _FIRST))
            assert self._map is not None
            content = self._map[:size].rstrip(b"\n\0")
            self.end = len(content) + bool(content)
            self._map[len(content) : size] = b"\n" * (size - len(content))  # NULs of a growth that was cut off
        except BaseException:
            os.close(self._descriptor)
            raise

    def lines(self) -> list[bytes]:
        """What is there, empty lines left out."""
        assert self._map is not None
        return [line for line in self._map[: self.end].split(b"\n") if line]

    def append(self, lines: bytes) -> None:
        """Add lines, each with its newline.

        Raises:
            OSError: the disk is full.
        """
        end = self.end + len(lines)
        mapped = self._map
        if mapped is None or end > self._size:
            self._grow(2 * end)
            mapped = self._map
        mapped[self.end : end] = lines  # type: ignore[index]  # _grow has made it
        self.end = end

    def replace(self, lines: bytes) -> None:
        """Have these lines alone. Killed in between, the file holds the old ones, the new ones, or both.

        Raises:
            OSError: the disk is full.
        """
        before = self.end
        if len(lines) > before // 2:  # they could lie over each other: the old ones stay for now
            if self.end + len(lines) > 128 * _FIRST:  # before the file grows without end
                self._blank(0, before)
                self.end = 0
            self.append(lines)
            return
        assert self._map is not None
        self._map[: len(lines)] = lines
        self._blank(len(lines), before)
        self.end = len(lines)

    def close(self) -> None:
        """The file stays."""
        if self._map is not None:
            self._map.close()
            self._map = None
            os.close(self._descriptor)

    def _blank(self, start: int, end: int) -> None:
        assert self._map is not None
        for at in range(start, end, len(_BLANK)):
            upto = min(at + len(_BLANK), end)
            self._map[at:upto] = _BLANK[: upto - at]

    def _grow(self, size: int) -> None:
        """Room on the disk first, newlines in it next, and only then in memory."""
        there = os.fstat(self._descriptor).st_size
        for at in range(there, size, len(_BLANK)):
            data = _BLANK[: min(len(_BLANK), size - at)]
            if os.pwrite(self._descriptor, data, at) != len(data):
                raise OSError(28, "No space left on device")
        if self._map is not None:
            self._map.close()
        self._map = mmap.mmap(self._descriptor, size)
        self._size = size
