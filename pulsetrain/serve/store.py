"""What the page shows: the runs below a folder, and their curves, read in the background and kept on disk."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pulsetrain.engine.errors import PulsetrainError, RunFolderError
from pulsetrain.engine.logs import get_logger
from pulsetrain.runs.index import RunIndex, log_sign_of
from pulsetrain.runs.listing import path_of
from pulsetrain.runs.summary import RunSummary, is_run
from pulsetrain.serve.background import BackgroundReader, Failure
from pulsetrain.serve.series import NEW, Described, Happened, Points, RunSeries, StoredSeries

__all__ = ["Series", "Store", "printable", "series_folder"]

_SERIES = Path(".pulsetrain") / "series"
_PART = 0.1  # seconds in which a part of the log of a run that is going is read, one run after the other
_KEY = re.compile(r"[0-9a-f]{24}")
_LEFT = 3600.0  # seconds, after which a folder of points that are being written was left by a process that was killed
_RETRY = 10.0  # seconds, after which a run is read again if the reason for which it was not may have passed


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
        self.sweeps: list[Path] = []  # their folders
        self._index = RunIndex(root)
        self._on_change = on_change
        self._folder = _writable(root)
        self._signs: dict[str, str] = {}
        self._stored: dict[str, StoredSeries] = {}
        self._rank_signs: dict[str, str] = {}  # of the logs of all ranks when they were last looked at
        self._live: dict[str, _Live] = {}
        self._reader = BackgroundReader(self._read)
        self._unread: dict[str, tuple[str, Failure, float]] = {}  # id -> sign, why, and when
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
        self._reader.close()
        if self._folder != self.root / _SERIES:  # a temporary one
            shutil.rmtree(self._folder, ignore_errors=True)

    def refresh(self) -> None:
        """Look which runs there are, and how they are."""
        found = {printable(path_of(each.folder, self.root)): each for each in self._index.summaries()}
        self.sweeps = [*map(Path, self._index.sweeps)]
        signs = {name: self._index.signs[str(each.folder)] for name, each in found.items()}
        (before, self.runs), (earlier, self._signs) = (self.runs, found), (self._signs, signs)
        if found.keys() != before.keys():
            self._delete_points_of_others(found)
        for name in found.keys() | before.keys():
            is_changed = earlier.get(name) != signs.get(name) or _shown(before.get(name)) != _shown(found.get(name))
            may_be_read_again = self._may_be_read_again(name)
            if may_be_read_again or name not in found:
                self._stored.pop(name, None)
                self._unread.pop(name, None)
                self._rank_signs.pop(name, None)
            if is_changed or may_be_read_again:
                self._on_change(name)
        for name, stored in list(self._stored.items()):
            run = found.get(name)
            if run is None or run.ranks == 1:
                continue
            sign = log_sign_of(str(run.folder))
            has_rested, self._rank_signs[name] = self._rank_signs.get(name) == sign, sign
            if has_rested and sign != stored.about.sign:  # other ranks have written since the first one
                self._stored.pop(name, None)
                self._on_change(name)
        self._reader.forget_others(found)
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
            if live.failure:
                return live.failure
            try:
                live.begin()  # without the lock, which other runs need meanwhile
            except (PulsetrainError, OSError) as error:
                return str(error)
            return live
        sign = log_sign_of(str(summary.folder))
        unread = self._unread.get(name)
        if unread is not None and unread[0] == sign:
            return unread[1].reason
        stored = self._stored.get(name)
        if stored is None or stored.about.sign != sign or not stored.is_there:
            folder = self._folder / _key(name)
            stored = StoredSeries.open(folder, sign)
            if stored is None:
                self._reader.read(name, summary.folder, folder, sign)
                return None
            self._stored[name] = stored
        self._reader.forget(name)  # its process may have been killed once the points were written
        return stored.opened()

    @property
    def reading(self) -> int:
        """How many runs are being read."""
        return len(self._reader) + sum(live.is_partial for live in list(self._live.values()))

    def _read(self, name: str, sign: str, failure: Failure | None) -> None:
        if failure is not None:
            self._unread[name] = sign, failure, time.monotonic()
        self._on_change(name)

    def _delete_points_of_others(self, names: Iterable[str]) -> None:
        """Delete the points of runs that were removed or renamed, and what a killed reader has left."""
        keys = {_key(name) for name in names}
        with suppress(OSError):
            for folder in list(self._folder.iterdir()):
                is_left = folder.name.startswith(NEW) and time.time() - folder.stat().st_mtime > _LEFT
                if is_left or (_KEY.fullmatch(folder.name) and folder.name not in keys):
                    shutil.rmtree(folder, ignore_errors=True)

    def _may_be_read_again(self, name: str) -> bool:
        _, failure, at = self._unread.get(name, ("", None, 0.0))
        return failure is not None and failure.may_pass and time.monotonic() - at > _RETRY

    def _watch_runs(self) -> None:
        pause = 1.0
        while not self._closed.wait(pause):
            began = time.monotonic()
            try:
                self.refresh()
            except (PulsetrainError, OSError):  # the folder may be gone for a while
                pass
            except Exception as error:  # else the page would not change any more, and not say so
                get_logger("serve").error("the runs could not be read", reason=f"{type(error).__name__}: {error}")
            pause = max(1.0, 5 * (time.monotonic() - began))

    def _watch_live(self) -> None:
        pause = 0.25
        while not self._closed.wait(pause):
            every = list(self._live.items())
            for name, live in every:
                try:
                    if live.update():
                        self._on_change(name)
                except (PulsetrainError, OSError):
                    pass
                except Exception as error:
                    live.failure = f"{type(error).__name__}: {error}"
                    self._on_change(name)
            pause = 0.01 if any(live.is_partial for _, live in every) else 0.25


class _Live:
    """The curves of a run that is going, once it has begun to be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: RunSeries | None = None
        self._lock = threading.Lock()
        self.failure = ""  # why it is not read any more

    def begin(self) -> None:
        """Read the first part of its log, unless that was done.

        Raises:
            RecordingError: it holds no event log.
        """
        with self._lock:
            self._read = self._read or RunSeries(self._folder, _PART)

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

    @property
    def is_partial(self) -> bool:
        """Whether more of its log is there than was read."""
        return self._read is not None and not self.failure and not self._read.is_complete

    def update(self) -> bool:
        """Read the next part; returns whether there was anything."""
        if not self._lock.acquire(blocking=False):  # its first part is being read, or points are
            return False
        try:
            return self._read is not None and not self.failure and self._read.update(_PART)
        finally:
            self._lock.release()


def printable(text: str) -> str:
    """A text that UTF-8 can hold: names of folders may be any bytes."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def _shown(run: RunSummary | None) -> object:
    return None if run is None else (run.status, run.iteration, run.tags)


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
