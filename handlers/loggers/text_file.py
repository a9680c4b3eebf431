"""Loggers to files of lines, which a killed run may have cut short and which a full disk must leave whole."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.subscription import OnError
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.loggers.base import MetricLogger, Observe
from pulsetrain.handlers.run_files.run_folder import replace_file

__all__ = ["Backlog", "TextFileLogger", "drop_unfinished_line", "write_end"]

Line = TypeVar("Line")

_AT_MOST = 10_000  # waiting lines: a disk that stays full must not fill the memory
_AT_ONCE = 100  # lines per write; each new line is another attempt


class Backlog(Generic[Line]):
    """Lines that wait to be written, in order. Beyond 10,000 the oldest are lost, with one warning.

    Args:
        place: the logger's class name, for the warning.
    """

    def __init__(self, place: str) -> None:
        self.lines: deque[Line] = deque()
        self._place = place
        self._warned = False

    def put(self, line: Line) -> bool:
        """Add a line; returns whether the oldest was lost for it."""
        self.lines.append(line)
        if len(self.lines) <= _AT_MOST:
            return False
        self.lines.popleft()
        if not self._warned:
            self._warned = True
            get_logger("handlers").warning(
                f"{self._place}: more than {_AT_MOST:,} lines wait for the disk; the oldest are lost from now on"
            )
        return True

    def first(self) -> Sequence[Line]:
        """The lines of the next write."""
        return list(islice(self.lines, _AT_ONCE))

    def drop_first(self, count: int) -> None:
        """Remove lines that have been written."""
        for _ in range(count):
            self.lines.popleft()

    def cut(self, kept: int) -> None:
        """Remove all lines after the first `kept`."""
        while len(self.lines) > kept:
            self.lines.pop()


class TextFileLogger(MetricLogger, Generic[Line]):
    """Keeps one file of lines in the run folder.

    Args:
        folder: the run folder.
        every: read `state.output` at this cadence instead of METRICS_LOGGED; each reading waits for the device.
        clock: seconds, for `Every(seconds=...)`.
        on_error: "warn" continues when a line cannot be written, and writes it with the next one; up to 10,000 wait.
            "raise" ends the run.
    """

    file_name: ClassVar[str]

    def __init__(
        self,
        folder: str | Path,
        every: Every | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "warn",
    ) -> None:
        super().__init__(every, clock=clock, on_error=on_error)
        self.folder = Path(folder)
        self.path = self.folder / self.file_name
        self._written = 0  # lines in the file
        self._waiting: Backlog[Line] = Backlog(type(self).__name__)
        self._saved: Mapping[str, Any] | None = None  # the state of a checkpoint that is being loaded

    @property
    def destination(self) -> Path:
        return self.path.resolve()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The file is unchanged until CHECKPOINT_LOADED, when the run resumes from there."""
        self._saved = state

    @abstractmethod
    def cut(self, saved: Mapping[str, Any], iteration: int) -> None:
        """Remove the lines that were written after the checkpoint of this state, from that iteration on.

        The resumed run writes them again. Does nothing if the file belongs to another run.
        """

    def _subscribe(self, subscribe: Observe) -> None:
        super()._subscribe(subscribe)
        subscribe(Events.CHECKPOINT_LOADED, self._on_loaded)

    def _on_loaded(self, engine: Engine) -> None:
        saved, self._saved = self._saved, None
        if saved is not None:
            self.cut(saved, engine.state.iteration)


def drop_unfinished_line(path: Path) -> None:
    """Remove a last line without an end, which a process killed in mid-write leaves, with a warning."""
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
    """Append to the file, or overwrite its end; handed to the operating system when this returns.

    Args:
        path: opened each time: such lines are rare, and nothing is left to close when a run fails.
        content: whole lines; at least as long as those that they replace, so that one write is enough.
        replaced: the end to overwrite; if the file ends differently, nothing is replaced.

    Returns:
        Whether the end was replaced.

    Raises:
        OSError: the file is unchanged.
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
