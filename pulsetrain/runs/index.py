"""The runs below a folder, remembered in a small database, so that only those that have changed are read again."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.recording import logged_ranks
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.engine.recording.log.run_file import RUN_FORMAT
from pulsetrain.engine.recording.log.scan import FORMAT
from pulsetrain.runs.summary import ARCHIVE_SUFFIX, RunSummary, Status, is_run, is_run_of, summarize
from pulsetrain.runs.tags import TAGS_FILE

__all__ = ["INDEX", "RunIndex", "log_sign_of", "sign_of"]

INDEX = Path(".pulsetrain") / "index.sqlite"
_VERSION = 10 << 16 | RUN_FORMAT << 8 | FORMAT  # of what is remembered, and of the files that can be read
_DEPTH = 6  # folders below the root
_RECENT = 10_000_000_000  # nanoseconds; a folder that was changed since may change again at the same time stamp
_MANY = 200  # runs, from which on several processes read them
_OF_RUNS = frozenset({"events", "checkpoints", "plots", "crash", "traces", "samples"})  # folders inside of a run
_OF_SWEEPS = frozenset({"sweep.lock", "sweep.sqlite", "trials"})  # one of which a sweep writes beside its sweep.yaml
_LOG = [f"/events/{path.name}" for path in log_files(Path())]
_FILES = [
    (path, path.split("/")[1]) for path in ("/run.json", "/config.yaml", f"/{TAGS_FILE}", "/.owner", "/events", *_LOG)
]
_PASSED = _OF_RUNS | {name for _, name in _FILES}


class _Known(NamedTuple):
    """What is remembered of a run or an archive."""

    sign: str  # of its files
    changed: int  # when the folder was changed, nanoseconds since 1970; 0 if it has to be looked through
    summary: RunSummary

    def is_unchanged(self, folder: str) -> bool:
        """Whether the folder holds the same names, and its files have the same sign."""
        if not self.changed or _changed_at(folder) != self.changed:
            return False
        try:
            for part in self.sign.split(" "):  # as `_sizes` writes it, which would take a quarter longer here
                name, _, numbers = part.partition(":")
                status = os.stat(folder + name)
                if numbers != f"{status.st_size}:{status.st_ctime_ns}":
                    return False
        except OSError:  # the file is gone
            return False
        return True


class RunIndex:
    """The runs below a folder.

    Deleting the database costs nothing but the time to read all runs again. Where it cannot be written, or is damaged,
    they are read each time.

    Args:
        root: a folder with runs, also in its subfolders; or a run.
        cache: whether to read and write the database.

    Raises:
        RunFolderError: the folder does not exist.
    """

    def __init__(self, root: Path, *, cache: bool = True) -> None:
        if not root.is_dir():
            what = "is a file" if root.exists() else "does not exist"
            raise RunFolderError(f"{root}: {what}; name a folder that holds runs")
        self.root = root
        self.signs: dict[str, str] = {}  # of the files of each run, by path, when they were last looked through
        self.unreadable: list[str] = []  # folders that may hold runs
        self.sweeps: list[str] = []  # folders of sweeps
        self._changed: dict[str, int] = {}  # of folders that hold nothing but a run: see `_Known.changed`
        self._start = "" if str(root) == "." else f"{str(root).removesuffix('/')}/"  # of all paths below the root
        self._path = root / INDEX if cache and not is_run(root) else None

    def summaries(self, *, archives: bool = False) -> list[RunSummary]:
        """All runs, in the order of their paths.

        Args:
            archives: whether runs that were archived as files are listed, too.
        """
        known = {path: each for path, each in self._known().items() if archives or not path.endswith(ARCHIVE_SUFFIX)}
        self.signs = signs = dict(self._found(archives, known))
        found = {path: each.summary for path, each in known.items() if signs.get(path) == each.sign}
        fresh = sorted(signs.keys() - found.keys())
        read = {path: each for path, each in zip(fresh, _read(fresh), strict=True) if each is not None}
        found |= {path: _decode(each) for path, each in read.items()}
        gone = known.keys() - found.keys()
        changed = {path: time for path, time in self._changed.items() if path in known}
        if read or gone or changed:
            # a run in progress changes by itself: it stalls, or its process ends
            settled = {path: each for path, each in read.items() if found[path].is_settled}
            self._remember(settled, gone | (read.keys() - settled.keys()))
        return [found[path] for path in sorted(found)]

    def _found(self, archives: bool, known: Mapping[str, _Known]) -> Iterator[tuple[str, str]]:
        """The paths of runs and archives, with their signs."""
        self.unreadable, self.sweeps, self._changed = [], [], {}
        settled = time.time_ns() - _RECENT
        unchanged = _unchanged(known)
        todo = [(str(self.root), 0)]
        while todo:
            folder, depth = todo.pop()
            if folder in unchanged:
                yield folder, known[folder].sign
                continue
            try:
                with os.scandir(folder) as entries:
                    here = list(entries)
            except OSError as error:
                if isinstance(error, PermissionError):
                    self.unreadable.append(folder)
                continue
            names = frozenset([each.name for each in here])
            if "sweep.yaml" in names and not names.isdisjoint(_OF_SWEEPS):
                self.sweeps.append(folder.removeprefix("./"))
            is_a_run, sign = is_run_of(names), ""
            if is_a_run:
                if os.access(folder, os.X_OK):
                    sign = _sign(folder, names)
                    yield folder, sign
                else:
                    self.unreadable.append(folder)
            passed = _PASSED if is_a_run else frozenset({"crash"})  # crash bundles contain logs, too
            is_leaf = is_a_run
            for each in here:
                name, path = each.name, each.path.removeprefix("./")  # of ".": as Path writes it
                is_leaf = is_leaf and not name.endswith(ARCHIVE_SUFFIX)
                if archives and name.endswith(ARCHIVE_SUFFIX) and os.path.isfile(path):
                    yield path, sign_of(path)
                elif name[0] != "." and name not in passed and each.is_dir(follow_symlinks=False):
                    is_leaf = False
                    if depth < _DEPTH:
                        todo.append((path, depth + 1))
            if is_leaf and _is_whole(sign, names) and 0 < (changed := _changed_at(folder)) < settled:
                self._changed[folder] = changed

    def _known(self) -> dict[str, _Known]:
        """What is remembered, by path; the root may have been written differently then."""
        if self._path is None or not os.path.exists(self._path):  # False, too, in a folder that may not be read
            return {}
        try:
            with closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as database:
                if database.execute("pragma user_version").fetchone()[0] != _VERSION:
                    return {}
                rows = database.execute("select path, sign, changed, summary from runs").fetchall()
            known = {}
            for within, sign, changed, blob in rows:
                path = self._start + os.fsdecode(within)
                if (summary := _named(_decode(blob), path)) is not None:
                    known[path] = _Known(sign, changed, summary)
            return known
        except (sqlite3.Error, msgspec.DecodeError, OSError):  # damaged, or being replaced: all runs are read again
            return {}

    def _remember(self, read: Mapping[str, bytes], gone: set[str]) -> None:
        if self._path is None:
            return
        with suppress(sqlite3.Error, OSError):  # a folder that cannot be written: nothing is remembered
            self._path.parent.mkdir(exist_ok=True)
            try:
                self._write(read, gone)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # busy, or not writable
                    raise
                self._path.unlink()
                self._write(read, gone)

    def _write(self, read: Mapping[str, bytes], gone: set[str]) -> None:
        assert self._path is not None
        with closing(sqlite3.connect(self._path, timeout=5)) as database, database:
            if database.execute("pragma user_version").fetchone()[0] != _VERSION:
                database.execute("drop table if exists runs")
                database.execute(f"pragma user_version = {_VERSION}")
            columns = "path blob primary key, sign text, changed integer, summary blob"
            database.execute(f"create table if not exists runs ({columns})")
            database.executemany("delete from runs where path = ?", [(self._within(path),) for path in gone])
            rows = [(self._within(path), self.signs[path], 0, summary) for path, summary in read.items()]
            database.executemany("insert or replace into runs values (?, ?, ?, ?)", rows)
            times = [(time, self._within(path)) for path, time in self._changed.items()]
            database.executemany("update runs set changed = ? where path = ?", times)

    def _within(self, path: str) -> bytes:
        """The path below the root, which other commands may write differently."""
        return os.fsencode(path.removeprefix(self._start))


def _named(summary: RunSummary, path: str) -> RunSummary | None:
    """The summary of a run by its path as it is written now; None if its reason names it as it was written before."""
    if summary.path == path:
        return summary
    if summary.path in summary.reason or "`pulsetrain " in summary.reason:  # a command quotes some names
        return None
    return replace(summary, path_bytes=os.fsencode(path))


def sign_of(path: str) -> str:
    """What changes when a file changes that a summary is read from; of an archive, the file itself."""
    if _is_archive(path):
        return _sizes(path, ("",))
    try:
        return _sign(path, os.listdir(path))
    except OSError:
        return ""


def log_sign_of(path: str) -> str:
    """What changes when a file changes that a log of the run is read from, of any rank."""
    try:
        return _sizes(path, [f"/events/{file.name}" for rank in logged_ranks(path) for file in log_files(Path(), rank)])
    except OSError:
        return ""


def _sign(folder: str, names: Container[str]) -> str:
    """The sign of a run folder that holds these names."""
    return _sizes(folder, [path for path, name in _FILES if name in names])


def _is_whole(sign: str, names: Container[str]) -> bool:
    """Whether the sign has all files that these names lead to; others may appear without a change of the folder."""
    return {*_signed(sign)} == {path for path, name in _FILES if name in names}


def _signed(sign: str) -> list[str]:
    """The files of a sign."""
    return [part.split(":", 1)[0] for part in sign.split(" ")]


def _changed_at(folder: str) -> int:
    """When names were added to a folder or removed, or its mode was changed; 0 if it is not there."""
    try:
        return os.stat(folder).st_ctime_ns
    except OSError:
        return 0


def _unchanged(known: Mapping[str, _Known]) -> set[str]:
    """The folders that need not be looked through. Of many, another process examines one half."""
    folders = [*known]
    if len(folders) < _MANY or not _may_fork():
        return _examined(known, folders)
    half = len(folders) // 2
    reads, writes = os.pipe()
    try:
        child = os.fork()
    except OSError:  # as many processes as the user may have, or no memory for another
        os.close(reads)
        os.close(writes)
        return _examined(known, folders)
    if not child:
        try:
            os.write(writes, bytes(known[each].is_unchanged(each) for each in folders[half:]))
        finally:
            os._exit(0)
    os.close(writes)
    try:
        with open(reads, "rb") as answer:
            unchanged = _examined(known, folders[:half])
            found = answer.read()  # less if that process was killed: then the others are looked through
    finally:  # after Ctrl-C, too
        with suppress(ChildProcessError):  # the system has already waited for it
            os.waitpid(child, 0)
    return unchanged | {each for each, is_same in zip(folders[half:], found, strict=False) if is_same}


def _examined(known: Mapping[str, _Known], folders: list[str]) -> set[str]:
    """Those of the folders that need not be looked through."""
    return {each for each in folders if known[each].is_unchanged(each)}


def _may_fork() -> bool:
    """Whether another process helps; in it, a lock that another thread holds now would stay locked."""
    return hasattr(os, "fork") and (os.cpu_count() or 1) > 1 and threading.active_count() == 1


def _sizes(path: str, names: Iterable[str]) -> str:
    parts = []
    for name in names:
        try:
            status = os.stat(path + name)
        except OSError:
            continue
        parts.append(f"{name}:{status.st_size}:{status.st_ctime_ns}")
    return " ".join(parts)


def _is_archive(path: str) -> bool:
    return path.endswith(ARCHIVE_SUFFIX) and os.path.isfile(path)


def _read(paths: list[str]) -> list[bytes | None]:
    if len(paths) < _MANY or not _may_fork():
        return [_summary(path) for path in paths]
    from concurrent.futures import BrokenExecutor, ProcessPoolExecutor  # here: a known folder is listed without

    try:
        with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            return list(pool.map(_summary, paths, chunksize=64))
    except (OSError, BrokenExecutor):  # no process can be started, or one was killed
        return [_summary(path) for path in paths]


def _summary(path: str) -> bytes | None:
    """The summary of a run, encoded; None if the run has just been removed."""
    try:
        if _is_archive(path):
            from pulsetrain.runs.archive import summarize_archive  # here, as zipfile is

            return _encode(summarize_archive(Path(path)))
        return _encode(summarize(Path(path)))
    except (RunFolderError, OSError):
        return None
    except Exception as error:  # whatever the bytes in its files lead to, the other runs are listed
        return _encode(RunSummary.unreadable(path, Status.KILLED, f"cannot be read: {type(error).__name__}: {error}"))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RunSummary).decode
