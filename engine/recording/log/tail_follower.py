"""Follows the tail of a log: each reading takes the lines that are new, unless the file was rewritten."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import msgspec

from pulsetrain.engine.recording.log.files import open_file
from pulsetrain.engine.recording.log.records import LoggedEvent, decode
from pulsetrain.engine.recording.log.scan import HEAD, TailHead
from pulsetrain.engine.recording.log.tail import unchecked

__all__ = ["TailFollower"]

_PIECE = 1 << 14  # bytes to read at once
_BLANK = b"\n\0"  # what the end of the file is filled with


class TailFollower:
    """The lines of a tail, as they come.

    The writer appends lines, and rewrites the file whenever it seals a block. The line before the position shows which
    of the two has happened: if it is not there any more, the file is read from its beginning, and events are returned
    again. A line that is being written has a wrong checksum, and is read the next time.

    Args:
        path: the file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restart()

    def restart(self) -> None:
        """Read from the beginning the next time."""
        self.head: TailHead | None = None  # the newest one; None if the file has none
        self.damaged: int = 0  # lines
        self._position = 0  # after the last line that was read
        self._mark = b""  # that line, with its newline
        self._torn = b""  # the line at which the last reading ended

    def read(self) -> list[LoggedEvent]:
        """The events of new lines, in their order in the file; open ones come again when they are complete.

        Raises:
            OSError: the file cannot be read; a missing file has no lines.
        """
        try:
            with open_file(self.path) as file:
                content = self._new(file)
        except FileNotFoundError:
            self.restart()
            return []
        found: list[LoggedEvent] = []
        start, lines = self._position, content.split(b"\n")
        for number, line in enumerate(lines):
            end = start + len(line) + 1
            if line.strip(_BLANK):
                event = _decoded(line)
                if event is not None:
                    self._note(event, found)
                elif line == self._torn and number + 1 < len(lines):
                    self.damaged += 1
                else:  # it may be being written
                    self._torn = line
                    break
                self._position, self._mark = end, line + b"\n"
            start = end
        return found

    def _note(self, event: LoggedEvent | TailHead, found: list[LoggedEvent]) -> None:
        if isinstance(event, TailHead):
            self.head = event
        else:
            found.append(event)

    def _new(self, file: BinaryIO) -> bytes:
        """The bytes after the position; all bytes, and the position 0, if the file was rewritten."""
        if self._mark:
            file.seek(self._position - len(self._mark))
            if file.read(len(self._mark)) == self._mark:
                pieces = []
                while piece := file.read(_PIECE):
                    pieces.append(piece)
                    if piece[-1] in _BLANK and piece[-2:-1] in (b"\n", b"\0"):  # nothing follows an empty line
                        break
                return b"".join(pieces).rstrip(_BLANK)
        file.seek(0)
        self._position, self._mark = 0, b""
        return file.read().rstrip(_BLANK)


def _decoded(line: bytes) -> LoggedEvent | TailHead | None:
    """The event or the head that a line holds; None if the line is damaged or cut."""
    whole = unchecked(line)
    if whole is None:
        return None
    try:
        (event,) = decode(whole)
        return TailHead.of_line(whole) if event.event == HEAD else event
    except (msgspec.DecodeError, ValueError):
        return None
