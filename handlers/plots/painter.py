"""Draws the figures of a run, in this process or in one of its own, which alone imports matplotlib and renders.

The process is started when there is something to draw soon, and ends when its input ends: at the end of the run or
with this process, however that ends. It finishes what it is drawing, so a run that is killed has the figures of its
last round.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from pulsetrain.handlers.plots import figures
from pulsetrain.handlers.plots.curves import RunCurves
from pulsetrain.handlers.run_files.run_folder import replace_file

__all__ = ["Drawing", "DrawingProcess", "Figures", "InThisProcess", "Painter", "Result"]

_LENGTH = 8  # bytes that hold the size of a message
_NICE = 10  # of figures that nobody waits for
_END_SECONDS = 10.0  # for the process to end after its input
_STOPPING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # of a terminal or a queue, which signal the whole group


@dataclass(frozen=True)
class Figures:
    """Figures to draw: their data, their files, and their kinds."""

    engine: str
    curves: Mapping[str, Any]  # what RunCurves.snapshot returned
    files: Mapping[str, Path]  # name of the figure -> its file, without a suffix
    formats: tuple[str, ...]


@dataclass
class Result:
    """What has been drawn."""

    written: list[Path] = field(default_factory=list)
    failed: dict[tuple[str, str], OSError | str] = field(default_factory=dict)  # (engine, figure) -> error, or its text
    seconds: float = 0.0
    lost: str = ""  # why the process could not draw; then nothing else is known


@dataclass(frozen=True)
class Drawing:
    """What is being drawn."""

    parts: Sequence[Figures]
    awaited: bool = True  # else training goes first

    @property
    def names(self) -> list[tuple[str, str]]:
        """The engine and the name of each figure."""
        return [(part.engine, name) for part in self.parts for name in part.files]


class Painter(Protocol):
    """Draws; one drawing at a time."""

    def prepare(self) -> None:
        """Something is to be drawn soon."""

    def start(self, drawing: Drawing, clock: Callable[[], float]) -> None:
        """Begin to draw."""

    def is_busy(self) -> bool:
        """Whether a drawing is under way."""

    def result(self) -> Result | None:
        """That of the last drawing, once, after waiting for its end; None if it has been returned already."""

    def close(self) -> None:
        """Free what is used for drawing; may be used again."""


class InThisProcess:
    """Draws at once."""

    def __init__(self) -> None:
        self._result: Result | None = None

    def prepare(self) -> None:
        pass

    def start(self, drawing: Drawing, clock: Callable[[], float]) -> None:
        started = clock()
        self._result = _draw(drawing)
        self._result.seconds = clock() - started

    def is_busy(self) -> bool:
        return False

    def result(self) -> Result | None:
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        pass


class DrawingProcess:
    """Draws in a process of its own; a thread waits for it.

    After a fork, the process belongs to the parent: the child starts another one.

    >>> import tempfile, time
    >>> run, folder, painter = RunCurves(), tempfile.TemporaryDirectory(), DrawingProcess()
    >>> run.add(1, {"train/loss": 0.5})
    >>> files = {"loss": Path(folder.name) / "loss"}
    >>> painter.start(Drawing([Figures("", run.snapshot(["loss"]), files, ("svg",))]), time.monotonic)
    >>> [path.name for path in painter.result().written]
    ['loss.svg']
    >>> painter.close()
    >>> folder.cleanup()
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._results: list[Result] = []
        self._end: Callable[[], object] = lambda: None
        self._starting = threading.Lock()

    def prepare(self) -> None:
        """Start the process, which imports matplotlib, in a thread: the first drawing need not wait for that."""
        self._leave_in_child()
        threading.Thread(target=self._start_process, name="plots", daemon=True).start()

    def start(self, drawing: Drawing, clock: Callable[[], float]) -> None:
        self._leave_in_child()
        self._results = []
        self._thread = threading.Thread(target=self._exchange, args=(drawing, clock), name="plots", daemon=True)
        self._thread.start()

    def is_busy(self) -> bool:
        self._leave_in_child()
        return self._thread is not None and self._thread.is_alive()

    def result(self) -> Result | None:
        self._leave_in_child()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._results.pop() if self._results else None

    def close(self) -> None:
        self._leave_in_child()
        if self._thread is not None:
            self._thread.join()
        with self._starting:
            self._end()

    def _leave_in_child(self) -> None:
        if self._owner != os.getpid():
            self._owner = os.getpid()
            self._process = self._thread = None
            self._results = []
            self._starting = threading.Lock()  # another thread of the parent may have held it

    def _exchange(self, drawing: Drawing, clock: Callable[[], float]) -> None:
        """In the thread: nothing of the training process waits for pipes, nor for the start of the process."""
        started = clock()
        try:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            _send(process.stdin, drawing)
            result = _receive(process.stdout)
            if not isinstance(result, Result):
                raise EOFError(f"the process that draws ended with status {process.wait()}")
        except Exception as error:
            result = Result(lost=f"{type(error).__name__}: {error}")
        result.seconds = clock() - started
        self._results.append(result)

    def _start_process(self) -> None:
        with suppress(OSError):  # the first drawing reports it
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        with self._starting:
            return self._process_that_runs()

    def _process_that_runs(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        # of this thread, which the process inherits: until it ignores them, they would end it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy's threads would take memory for nothing
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._end = weakref.finalize(self, _end, self._process, os.getpid())
        return self._process


def serve() -> None:
    """What the process does: draws what its input asks for, until that ends."""
    for each in _STOPPING:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    source, replies = os.fdopen(0, "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what matplotlib prints is not a reply
    with suppress(ImportError):  # which the first drawing reports
        importlib.import_module("matplotlib.backends.backend_agg")
    while (drawing := _receive(source)) is not None:
        try:
            _send(replies, _draw(drawing) if drawing.awaited else _draw_aside(drawing))
        except BrokenPipeError:  # nobody waits for it any more
            return


def _draw(drawing: Drawing) -> Result:
    """Draw and write each figure; one that fails does not keep the others from being drawn."""
    result = Result()
    for part in drawing.parts:
        run = RunCurves()
        run.load_state_dict(part.curves)
        for name, file in part.files.items():
            try:
                figure = run.figure(name)
                if figure is None:
                    continue
                for kind in part.formats:
                    content = figures.render(figure, kind)
                    file.parent.mkdir(exist_ok=True)
                    path = file.with_name(f"{file.name}.{kind}")
                    replace_file(path, content)
                    result.written.append(path)
            except OSError as error:
                result.failed[part.engine, name] = OSError(error.errno, error.strerror)
            except Exception:
                result.failed[part.engine, name] = traceback.format_exc()
    return result


def _draw_aside(drawing: Drawing) -> Result:
    """The same in a thread of lower priority, where the system has such threads: a process could not raise it again."""

    def lower() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)

    with ThreadPoolExecutor(1, initializer=lower) as thread:
        return thread.submit(_draw, drawing).result()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner != os.getpid():
        return
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _send(pipe: IO[bytes], value: object) -> None:
    content = pickle.dumps(value)
    waiting = memoryview(len(content).to_bytes(_LENGTH, "little") + content)
    while waiting:
        waiting = waiting[pipe.write(waiting) :]


def _receive(pipe: IO[bytes]) -> Any:
    """The next message; None at the end."""
    size = _read(pipe, _LENGTH)
    content = _read(pipe, int.from_bytes(size, "little")) if size else b""
    return pickle.loads(content) if content else None


def _read(pipe: IO[bytes], size: int) -> bytes:
    parts, missing = list[bytes](), size
    while missing and (part := pipe.read(min(missing, 1 << 20))):
        parts.append(part)
        missing -= len(part)
    return b"" if missing else b"".join(parts)
