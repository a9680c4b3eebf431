"""The open end of a log: a memory-mapped text file that survives the process.

Writing a line costs no system call, and the line is in the file even if the process is killed. The file is filled with
newlines first: text tools see empty lines, and a full disk raises an error when the file grows, not SIGBUS on a write.

A file that other hosts share is not mapped: a server that fails would raise SIGBUS, too. There each line is one write.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from pulsetrain.engine.file_system import file_system_of, report_once

__all__ = ["CHUNK", "Tail", "unchecked", "written"]

CHUNK = 1 << 16  # bytes; the file's size is a multiple, so that a cut is noticed
_BLANK = b"\n" * CHUNK
_PLAIN = "the event log is written by plain writes, not by a mapped file; other hosts see an event some seconds later"


class PlainFile:
    """What `mmap` offers for a file, by reading and writing it.

    Args:
        descriptor: of the file.
        size: of the file, in bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size = descriptor, size

    def __getitem__(self, part: slice) -> bytes:
        start, end, _ = part.indices(self._size)
        found = b""
        while start < end and (piece := os.pread(self._descriptor, end - start, start)):
            found, start = found + piece, start + len(piece)
        return found

    def __setitem__(self, part: slice, content: bytes) -> None:
        start, end, _ = part.indices(self._size)
        if end - start != len(content):
            raise IndexError(f"{len(content)} bytes do not fit into {start} to {end}")
        while content:
            written = os.pwrite(self._descriptor, content, start)
            start, content = start + written, content[written:]

    def close(self) -> None:
        """Nothing is mapped."""


class Tail:
    """The lines that are not sealed yet, in the order in which they were written.

    Args:
        path: created if it is missing; existing lines are kept.

    Raises:
        OSError: the file cannot be created, or the disk is full.
    """

    _map: mmap.mmap | PlainFile
    end: int

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0  # where the next line goes
        self._size = 0  # of the file that is mapped
        self._system = file_system_of(path)
        self._is_plain = self._system.is_shared
        if self._is_plain:
            report_once(self._system.type, _PLAIN)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(self._descriptor).st_size
            self._grow(max(size, CHUNK))
            content = written(self._map[:size])
            self.end = len(content) + bool(content)
            self._map[len(content) : size] = b"\n" * (size - len(content))  # NULs of a growth that was cut off
        except BaseException:
            os.close(self._descriptor)
            raise

    def lines(self) -> list[bytes]:
        """The lines of the file, without the empty ones."""
        return [line for line in self._map[: self.end].lstrip(b"\n").split(b"\n") if line]

    def append(self, line: bytes) -> None:
        """Append a line, a JSON object without a newline, with its checksum.

        Raises:
            OSError: the disk is full.
        """
        content = b'%b,"c":%d}\n' % (line[:-1], _checksum(line))  # `_checked`, without the call
        start = self.end
        end = start + len(content)
        if end > self._size:
            self._grow(2 * end)
        self._map[start:end] = content
        self.end = end

    def replace(self, lines: Iterable[bytes], *, erase: bool = False) -> None:
        """Replace all lines by these. If the process is killed meanwhile, the file holds the old, the new, or both.

        Args:
            lines: without checksums.
            erase: make sure that nothing else is left in the file.

        Raises:
            OSError: the disk is full.
        """
        content, before = b"".join([_checked(line) for line in lines]), self.end
        start, end = 0, len(content)
        if end > before // 2:  # old and new could overlap: keep the old ones for now; `end` stays below 3 copies
            start, end = before, before + end
            if end > self._size:
                self._grow(2 * end)
        self._map[start:end] = content
        if not start:
            self._blank(end, before)
        elif erase:
            self._blank(0, start)
        self.end = end

    def close(self) -> None:
        """Unmap the file, which is kept."""
        if self._size:
            self._map.close()
            os.close(self._descriptor)
            self._size, self._descriptor = 0, -1  # whose number another file may get

    def _blank(self, start: int, end: int) -> None:
        for at in range(start, end, len(_BLANK)):
            upto = min(at + len(_BLANK), end)
            self._map[at:upto] = _BLANK[: upto - at]

    def _grow(self, size: int) -> None:
        """Allocate on the disk first, by writing newlines; only then map."""
        if self._descriptor < 0:
            raise ValueError("the event log is closed: nothing can be written to it; open it again with LogWriter")
        size += -size % CHUNK
        there = os.fstat(self._descriptor).st_size
        for at in range(there, size, len(_BLANK)):
            data = _BLANK[: min(len(_BLANK), size - at)]
            if os.pwrite(self._descriptor, data, at) != len(data):
                raise OSError(28, "No space left on device")
        if self._size:
            self._map.close()
        self._map = self._mapped(size)
        self._size = size

    def _mapped(self, size: int) -> mmap.mmap | PlainFile:
        if not self._is_plain:
            try:
                return mmap.mmap(self._descriptor, size)
            except OSError as error:
                self._is_plain = True
                report_once(self._system.type, _PLAIN, str(error))
        return PlainFile(self._descriptor, size)


_checksum = zlib.adler32  # over the line without its checksum


def _checked(line: bytes) -> bytes:
    return b'%b,"c":%d}\n' % (line[:-1], _checksum(line))


def unchecked(line: bytes) -> bytes | None:
    """A line of the tail without its checksum; None if the line is damaged or cut.

    >>> unchecked(_checked(b'{"seq":1}')[:-1])
    b'{"seq":1}'
    >>> unchecked(b'{"seq":2,"c":1}') is None
    True
    """
    content, mark, end = line.rpartition(b',"c":')
    whole = content + b"}"
    return whole if mark and end == b"%d}" % _checksum(whole) else None


def written(content: bytes) -> bytes:
    r"""The content of a tail up to its last line; what follows was never written.

    >>> written(b'{"seq":1,"c":5}\n{"se\n\n\0')
    b'{"seq":1,"c":5}\n{"se'
    """
    end = content.rfind(b"}") + 1
    with memoryview(content) as view:
        is_blank = all(_BLANK.startswith(view[at : at + CHUNK]) for at in range(end, len(content), CHUNK))
    return content[:end] if is_blank else content.rstrip(b"\n\0")  # which takes much longer
