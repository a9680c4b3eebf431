"""Loggers to files of lines, which a killed run may have cut short and which a full disk must not damage."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pulsetrain.engine import Engine, Event, Events, Every, OnError, RunFolderError, is_training_run
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.loggers.base import MetricLogger, Status
from pulsetrain.handlers.run_files.ownership import FolderUse
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder, replace_file, writing

__all__ = ["TextFileLogger"]

Line = TypeVar("Line")

_AT_MOST = 10_000  # waiting lines: a disk that stays full must not fill the memory
_AT_ONCE = 100  # lines per write; each new line starts a new attempt


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
    unit: ClassVar[str]  # the key of the number of lines in a checkpoint

    _use: FolderUse

    def __init__(
        self,
        folder: str | Path,
        every: Every | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "warn",
    ) -> None:
        super().__init__(every, clock=clock, on_error=on_error)
        self.folder: Path = local_folder(type(self).__name__, folder)
        self.path: Path = self.folder / self.file_name
        self._written = 0  # lines in the file
        self._adopted = False  # whether those that were there at first are counted
        self._waiting: deque[Line] = deque()  # to be written, in order; beyond 10,000 the oldest are lost
        self._replaced: Line | None = None  # the file's last line, which the first waiting one will replace
        self._has_lost = False
        self._saved: Mapping[str, Any] | None = None  # the state of a checkpoint that is being loaded

    @property
    def destination(self) -> Path:
        return self.path.resolve()

    def prepare(self) -> None:
        make_folder(self._place, self.folder)
        self._use = FolderUse(self._place, self._attachment, lambda: self.folder, self._waiting.clear)
        self._written, self._adopted = 0, False
        if self._holds_lines():
            self.check_file()

    def open(self, engine: Engine) -> None:
        self._adopt()

    def close(self, status: Status) -> None:
        self._check_presence()

    def state_dict(self) -> dict[str, Any]:
        """How many lines the file has, including those that wait to be written, and how many wait if any do."""
        waiting = {"waiting": len(self._waiting)} if self._waiting else {}
        return {self.unit: self._final + len(self._waiting), **waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The file is unchanged until CHECKPOINT_LOADED, when the run resumes from there."""
        self._saved = state

    def begin_again(self) -> None:
        if self.bus is not None:
            self._adopt()
            self.cut([], {})

    @abstractmethod
    def check_file(self) -> None:
        """Raise `foreign` if the file there, whose last line may be unfinished, was written by something else."""

    @abstractmethod
    def read_lines(self) -> list[Line]:
        """The file's lines, without a header."""

    @abstractmethod
    def iteration_of(self, line: Line) -> int:
        """The iteration that the line reports."""

    @abstractmethod
    def is_of(self, line: Line, engine: str) -> bool:
        """Whether the engine of this name reports the line, in a file of a whole bus."""

    @abstractmethod
    def encoded(self, lines: Sequence[Line]) -> bytes:
        """The lines as they are appended to the file."""

    def forget_file(self) -> None:
        """The file is gone: the next line begins a new one."""
        self._written, self._replaced = 0, None

    def rewrite(self, lines: Sequence[Line]) -> None:
        """Replace the file by one with these lines."""
        replace_file(self.path, self.encoded(lines))

    def agrees(self, lines: Sequence[Line], saved: Mapping[str, Any]) -> bool:
        """Whether these can be the lines that were there when the checkpoint with this state was saved."""
        return True

    def cut(self, lines: Sequence[Line], saved: Mapping[str, object]) -> None:
        """Keep these lines, which were there when the checkpoint with this state was saved."""
        self.keep(lines)

    def keep(self, lines: Sequence[Line], changed: bool = False) -> None:
        """Remove all lines after these, of the file and of those that wait.

        Args:
            lines: the first ones.
            changed: whether the last of them differs from the one that is there.
        """
        final = self._final
        self._replaced, self._waiting = None, deque(lines[final:])
        if min(len(lines), final) < self._written or (changed and len(lines) <= final):
            with writing(self._place, self.folder, self.file_name):
                self.rewrite(lines[:final])
            self._written = min(len(lines), final)

    def foreign(self, why: str) -> RunFolderError:
        """The error for a file that something else has written."""
        rule = f"{self.path.name} there was not written by this logger: {why}; move it or choose another folder"
        return RunFolderError(rule, self._place, folder=str(self.folder))

    def put(self, line: Line) -> None:
        """Queue a line for the next `write`."""
        self._waiting.append(line)
        if len(self._waiting) <= _AT_MOST:
            return
        self._waiting.popleft()
        self._replaced = None  # the line that would have replaced it is lost
        if not self._has_lost:
            self._has_lost = True
            get_logger("handlers").warning(
                f"{self._place}: more than {_AT_MOST:,} lines wait for the disk; the oldest are lost from now on"
            )

    def write(self) -> None:
        """Write the queued lines, including those that waited while the disk was full."""
        self._check_presence()
        with self._use.taken(), writing(self._place, self.folder, self.file_name):
            while lines := list(islice(self._waiting, _AT_ONCE)):
                content = self.encoded(lines)
                replaced = b"" if self._replaced is None else self.encoded([self._replaced])
                self._written += len(lines) - write_end(self.path, content, replaced)
                self._replaced = None
                for _ in lines:
                    self._waiting.popleft()

    @property
    def _final(self) -> int:
        """The file's lines, without a last one that the first waiting line will replace."""
        return self._written - (self._replaced is not None)

    def _holds_lines(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size > 0

    def _adopt(self) -> None:
        """Before the first write: continue the file that is there, which until now another run may have written."""
        if self._adopted:
            return
        with self._use.taken(), writing(self._place, self.folder, self.file_name):
            if self._holds_lines():
                self.check_file()
                _drop_unfinished_line(self.path)
                self._written = len(self.read_lines())
        self._adopted = True

    def _check_presence(self) -> None:
        """Warn if the file has been removed since it was written to."""
        if self._written and not self.path.exists():
            get_logger("handlers").warning(
                f"{self.path.name} has been removed during the run: its {self.unit} are lost, and new ones begin "
                "another file where that can be written",
                path=str(self.path),
                lost=self._written,
            )
            self.forget_file()

    def _subscribe(self) -> None:
        super()._subscribe()
        self._observe(Events.CHECKPOINT_LOADED, self._on_loaded)

    def _on_loaded(self, engine: Engine, event: Event) -> None:
        """Remove the lines that were written after the checkpoint; the resumed run writes them again."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        self._adopt()
        kept = int(saved[self.unit])
        lines = [*(self.read_lines()[: self._final] if self._written else ()), *self._waiting]
        own, others = self._shared(lines[kept:], engine)
        later = all(self.iteration_of(line) >= engine.state.iteration for line in own)
        if kept <= len(lines) and later and self.agrees(lines[:kept], saved):
            self.cut(lines[:kept], saved)
            for line in others:
                self.put(line)
            if others:
                self.write()
        elif kept - int(saved.get("waiting", 0)) > len(lines) or kept <= len(lines):
            # else the only lines that are missing were never written: the run was stopped while they waited
            self._report_other_file(kept, len(lines), Path(event.payload.path))

    def _shared(self, lines: Sequence[Line], engine: Engine) -> tuple[Sequence[Line], Sequence[Line]]:
        """The lines of this engine, and those of the bus's other trainers, which do not return to its checkpoint."""
        bus = self.bus
        if bus is None or not self._attachment.follows_whole_bus:
            return lines, ()
        engines = {each.name: each for each in bus.engines if each is not engine}
        names = [name for name, each in engines.items() if is_training_run(each)]
        others = [line for line in lines if any(self.is_of(line, name) for name in names)]
        return [line for line in lines if self.is_of(line, engine.name)], others

    def _report_other_file(self, expected: int, there: int, checkpoint: Path) -> None:
        """The file is not the one that the checkpoint counts on. Nothing in it is removed: it may be of another run."""
        log, name = get_logger("handlers"), self.path.name
        facts = {"path": str(self.path), "missing": max(expected - there, 0), "there": there}
        if there >= expected:
            log.warning(
                f"{name} has {self.unit} of another run, which do not fit the checkpoint; those of this run follow; "
                "give each run its own folder",
                **facts,
            )
        elif there or checkpoint.parent.parent.resolve() == self.folder.resolve():
            log.warning(
                f"{name} has fewer {self.unit} than when the checkpoint was saved; the run continues it without the "
                "missing ones, unless you stop it and restore the file",
                **facts,
            )
        else:
            log.info(f"{name} begins here: the {self.unit} before the checkpoint are in another folder", **facts)


def _drop_unfinished_line(path: Path) -> None:
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
