"""Reads the logs of ended runs in other processes, and keeps their points on disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from pulsetrain.engine.errors import PulsetrainError
from pulsetrain.serve.series import RunSeries, StoredSeries

__all__ = ["BackgroundReader", "Failure"]

_MANAGER = 2.0  # seconds: the most that the thread of the pool is waited for
_KILLED = "the process that read its log was killed; is there enough memory?"


@dataclass(frozen=True)
class Failure:
    """Why a log was not read."""

    reason: str
    may_pass: bool  # whether another attempt may succeed, although the log is the same


class BackgroundReader:
    """Reads logs, several at a time.

    If one of its processes is killed, the runs that were being read or were waiting are ended without a failure, to be
    read again. They are then read one at a time: only the run whose process is killed again fails.

    Args:
        on_end: called with a run's id, its sign, and why it could not be read, or None; from another thread.
    """

    def __init__(self, on_end: Callable[[str, str, Failure | None], object]) -> None:
        self._on_end = on_end
        self._reading: dict[str, Future[Failure | None]] = {}
        self._suspects: set[str] = set()  # ids of runs that were being read, or waited, when a process was killed
        self._pool: _Pool | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._reading)

    def read(self, name: str, run: Path, folder: Path, sign: str) -> None:
        """Read a run's log, unless that has begun.

        Args:
            name: the run's id.
            run: the run folder.
            folder: where its points are kept.
            sign: of the files that are read.
        """
        with self._lock:
            if name in self._reading or self._is_closed:
                return
            try:
                pool = self._ready_pool()
                future = pool.executor.submit(_store, run, folder, sign)
            except BrokenProcessPool:  # one of its processes has just been killed
                self._drop_pool()
                pool = self._ready_pool()
                future = pool.executor.submit(_store, run, folder, sign)
            self._reading[name] = future
        future.add_done_callback(lambda done: self._finished(name, sign, pool, done))

    def forget(self, name: str) -> None:
        """Do not suspect a run that need not be read again: its points are there, or it was removed."""
        self._suspects.discard(name)

    def forget_others(self, names: Container[str]) -> None:
        """Do not suspect runs that are gone, also if they were removed while they were read."""
        for name in [each for each in self._suspects.copy() if each not in names]:
            self._suspects.discard(name)

    def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        with self._lock:
            manager = getattr(self._pool and self._pool.executor, "_executor_manager_thread", None)
            self._drop_pool()
        if manager is not None:  # Python, when it ends, would write into the pipe that this thread closes
            manager.join(_MANAGER)

    def _finished(self, name: str, sign: str, pool: _Pool, done: Future[Failure | None]) -> None:
        # without the lock: while a pool breaks, its thread may hold a lock of its own, which `submit` takes
        self._reading.pop(name, None)
        if done.cancelled() or self._is_closed:
            return
        error = done.exception()
        failure = done.result() if error is None else Failure(f"{type(error).__name__}: {error}", may_pass=False)
        if isinstance(error, BrokenProcessPool):
            is_alone = pool.reads_one_at_a_time and not pool.is_broken  # the first of a queue
            pool.is_broken = True
            failure = Failure(_KILLED, may_pass=False) if is_alone else None
            if not is_alone:
                self._suspects.add(name)
        if failure is not None or error is None:
            self._suspects.discard(name)
        self._on_end(name, sign, failure)

    def _ready_pool(self) -> _Pool:
        one_at_a_time = bool(self._suspects)
        if self._pool is not None and (
            self._pool.is_broken or (not self._reading and self._pool.reads_one_at_a_time != one_at_a_time)
        ):
            self._drop_pool()
        if self._pool is None:
            workers = 1 if one_at_a_time else max(1, min((os.cpu_count() or 2) - 1, 8))
            context = _Noting()
            reads, held = context.Pipe(duplex=False)
            executor = ProcessPoolExecutor(workers, context, _end_with, (reads,))
            self._pool = _Pool(executor, context, held, one_at_a_time)
        return self._pool

    def _drop_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.executor.shutdown(wait=False, cancel_futures=True)
            pool.held.close()
            for each in pool.context.made:  # also those that have only begun to start
                each.terminate()


@dataclass
class _Pool:
    executor: ProcessPoolExecutor
    context: _Noting
    held: Connection  # open as long as the processes are needed
    reads_one_at_a_time: bool  # because a process of an earlier pool was killed
    is_broken: bool = False


class _Noting(SpawnContext):
    """Starts processes that can be ended."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[SpawnProcess] = []

    def Process(self, *words: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        made = SpawnProcess(*words, **options)
        self.made.append(made)
        return made


def _end_with(server: Connection) -> None:
    """End this process with the server, also where that is killed: nothing is sent, but the connection ends."""

    def wait() -> None:
        with suppress(EOFError, OSError):
            server.recv_bytes()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _store(run: Path, folder: Path, sign: str) -> Failure | None:
    """Read a run's log and keep its points; returns why that was not possible, or None."""
    try:
        series = RunSeries(run)
        series.update(killed=True)
        StoredSeries.write(folder, series, sign)
    except (PulsetrainError, OSError) as error:
        return Failure(str(error), may_pass=isinstance(error, OSError) or isinstance(error.__cause__, OSError))
    return None
