"""What the page shows: the runs below a folder, and their curves, read in the background and kept on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any, Protocol

from pulsetrain.engine.errors import PulsetrainError, RunFolderError
from pulsetrain.runs.index import RunIndex
from pulsetrain.runs.listing import path_of
from pulsetrain.runs.summary import RunSummary, is_run
from pulsetrain.serve.series import Described, Happened, Points, RunSeries, StoredSeries

__all__ = ["Series", "Store", "printable", "series_folder"]

_SERIES = Path(".pulsetrain") / "series"
_MANAGER = 2.0  # seconds: the most that the thread of the pool is waited for
_KILLED = "the process that read its log was killed; is there enough memory?"


class Series(Protocol):
    """The curves of a run."""

    @property
    def about(self) -> Described: ...

    def opened(self) -> Series: ...

    def points(self, name: str) -> Points | None: ...

    def happened(self) -> Happened: ...


class Store:
    """The runs below a folder.

    Curves of ended runs are read by other processes, once, and kept in `.pulsetrain/series` of the folder, which may be
    deleted; where that cannot be written, or the folder is a run, they are kept until `close`. Those of runs that are
    going are read here, as they are written.

    Args:
        root: a folder with runs.
        on_change: called with the id of a run whose curves or status have changed; from another thread.

    Raises:
        RunFolderError: the folder does not exist.
    """

    def __init__(self, root: Path, on_change: Callable[[str], object] = lambda run: None) -> None:
        self.root = root
        self.runs: dict[str, RunSummary] = {}
        self._index = RunIndex(root)
        self._on_change = on_change
        self._folder = _writable(root)
        self._signs: dict[str, str] = {}
        self._stored: dict[str, StoredSeries] = {}
        self._live: dict[str, _Live] = {}
        self._reading: dict[str, Future[str]] = {}
        self._unreadable: dict[str, tuple[str, str]] = {}  # id -> sign, and why
        self._killed: dict[str, int] = {}  # id -> how often its reading was
        self._pool: ProcessPoolExecutor | None = None
        self._context = _Noting()
        self._held: Connection | None = None  # open as long as the processes of the pool are needed
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._watch_runs, self._watch_live)]
        self.refresh()

    def start(self) -> None:
        """Look for changes until `close`."""
        for each in self._threads:
            each.start()

    def close(self) -> None:
        """Stop looking, and end the processes that read."""
        self._closed.set()
        with self._lock:
            manager = getattr(self._pool, "_executor_manager_thread", None)
            self._drop_pool()
        if manager is not None:  # Python, when it ends, would write into the pipe that this thread closes
            manager.join(_MANAGER)  # without the lock, which the thread takes
        if self._folder != self.root / _SERIES:  # a temporary one
            shutil.rmtree(self._folder, ignore_errors=True)

    def _drop_pool(self) -> None:
        pool, held, self._pool, self._held = self._pool, self._held, None, None
        if pool is not None and held is not None:
            pool.shutdown(wait=False, cancel_futures=True)
            held.close()
            for each in self._context.made:  # also those that have only begun to start
                each.terminate()

    def refresh(self) -> None:
        """Look which runs there are, and how they are."""
        found = {printable(path_of(each.folder, self.root)): each for each in self._index.summaries()}
        signs = {name: self._index.signs[str(each.folder)] for name, each in found.items()}
        (before, self.runs), (earlier, self._signs) = (self.runs, found), (self._signs, signs)
        for name in found.keys() | before.keys():
            if earlier.get(name) != signs.get(name) or _shown(before.get(name)) != _shown(found.get(name)):
                self._stored.pop(name, None)
                self._on_change(name)
        with self._lock:
            for name in [name for name in self._live if name not in found or not found[name].status.is_going]:
                del self._live[name]
                self._on_change(name)

    def run(self, name: str) -> RunSummary:
        """A run by the path that it is listed with.

        Raises:
            RunFolderError: there is none.
        """
        try:
            return self.runs[name]
        except KeyError:
            raise RunFolderError(f"{name!r} is not a run below {self.root}; it was removed, or renamed") from None

    def series(self, name: str) -> Series | str | None:
        """The run's curves; a text that says why it has none; None while they are being read."""
        summary = self.run(name)
        if summary.status.is_going:
            with self._lock:
                live = self._live.setdefault(name, _Live(summary.folder))
            try:
                live.begin()  # without the lock, which other runs need meanwhile
            except (PulsetrainError, OSError) as error:
                return str(error)
            return live
        sign = self._signs.get(name, "")
        if name in self._unreadable and self._unreadable[name][0] == sign:
            return self._unreadable[name][1]
        stored = self._stored.get(name)
        if stored is not None and stored.about.sign == sign and stored.is_there:
            return stored.opened()
        folder = self._folder / _key(name)
        stored = StoredSeries.open(folder, sign)
        if stored is None:
            self._read(name, summary.folder, folder, sign)
        else:
            self._stored[name] = stored.opened()
        return stored

    @property
    def reading(self) -> int:
        """How many runs are being read."""
        return len(self._reading)

    def _read(self, name: str, run: Path, folder: Path, sign: str) -> None:
        with self._lock:
            if name in self._reading or self._closed.is_set():
                return
            try:
                future = self._started_pool().submit(_store, run, folder, sign)
            except BrokenProcessPool:  # one of its processes was killed
                self._drop_pool()
                future = self._started_pool().submit(_store, run, folder, sign)
            self._reading[name] = future

        def finished(done: Future[str]) -> None:
            with self._lock:
                self._reading.pop(name, None)
            if not done.cancelled() and not self._closed.is_set():
                failed = done.exception()
                why = str(failed) if failed is not None else done.result()
                if isinstance(failed, BrokenProcessPool):  # by this run, or by another one: it is read once more
                    self._killed[name] = self._killed.get(name, 0) + 1
                    why = _KILLED if self._killed[name] > 1 else ""
                if why:
                    self._unreadable[name] = (sign, why)
                self._on_change(name)

        future.add_done_callback(finished)

    def _started_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            workers = max(1, min((os.cpu_count() or 2) - 1, 8))
            self._context = _Noting()
            reads, self._held = self._context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(workers, self._context, _end_with, (reads,))
        return self._pool

    def _watch_runs(self) -> None:
        pause = 1.0
        while not self._closed.wait(pause):
            began = time.monotonic()
            with suppress(PulsetrainError, OSError):  # the folder may be gone for a while
                self.refresh()
            pause = max(1.0, 5 * (time.monotonic() - began))

    def _watch_live(self) -> None:
        while not self._closed.wait(0.25):
            for name, live in list(self._live.items()):
                with suppress(PulsetrainError, OSError):
                    if live.update():
                        self._on_change(name)


class _Noting(SpawnContext):
    """Starts processes that can be ended."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[SpawnProcess] = []

    def Process(self, *words: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        made = SpawnProcess(*words, **options)
        self.made.append(made)
        return made


class _Live:
    """The curves of a run that is going, once it has begun to be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: RunSeries | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Read its log as far as it is written, unless that was done; of a long log, that takes a while.

        Raises:
            RecordingError: it holds no event log.
        """
        with self._lock:
            self._read = self._read or RunSeries(self._folder)

    @property
    def _series(self) -> RunSeries:
        assert self._read is not None
        return self._read

    @property
    def about(self) -> Described:
        with self._lock:
            return self._series.described()

    def opened(self) -> _Live:
        return self

    def points(self, name: str) -> Points | None:
        with self._lock:
            return self._series.points(name)

    def happened(self) -> Happened:
        with self._lock:
            return self._series.happened()

    def update(self) -> bool:
        with self._lock:
            return self._read is not None and self._read.update()


def printable(text: str) -> str:
    """A text that UTF-8 can hold: names of folders may be any bytes."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def _shown(run: RunSummary | None) -> object:
    return None if run is None else (run.status, run.iteration, run.tags)


def _end_with(server: Connection) -> None:
    """End this process with the server, also where that is killed: nothing is sent, but the connection ends."""

    def wait() -> None:
        with suppress(EOFError, OSError):
            server.recv_bytes()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _store(run: Path, folder: Path, sign: str) -> str:
    """Read a run's log and keep its points; returns why that was not possible, or ""."""
    try:
        series = RunSeries(run)
        series.update(killed=True)
        StoredSeries.write(folder, series, sign)
    except (PulsetrainError, OSError) as error:
        return str(error)
    return ""


def series_folder(root: Path, name: str) -> Path:
    """Where the points of a run are kept if the root can be written."""
    return root / _SERIES / _key(name)


def _key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _writable(root: Path) -> Path:
    """Where points are kept: below the root, or else in a temporary folder; a root that is a run is only read."""
    folder = root / _SERIES
    with suppress(OSError):
        if not is_run(root):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return Path(tempfile.mkdtemp(prefix="pulsetrain-series-"))
