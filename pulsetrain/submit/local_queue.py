"""The queue of one machine: jobs in a SQLite file, from which any process can continue.

A job is waiting, running, cancelling, or has ended: done, failed or cancelled. Which jobs run is known by locks, not by
the file alone: the processes of a running job hold the lock of its file `ID.lock`, whichever process started them. A
job that is running by the file, and whose lock is free, was killed; it waits again.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.file_lock import lock
from pulsetrain.handlers.run_files.redaction import redacted

__all__ = ["ENDED", "LocalQueue", "QueuedJob", "default_folder", "environment_here", "taken_lock"]

ENDED = ("done", "failed", "cancelled")
_NUMBERS = range(1, 1 << 63)  # that SQLite gives to jobs
LOCATION = "PULSETRAIN_QUEUE"  # the environment variable with the queue's folder
_COLUMNS = (
    "id, name, state, words, directory, python, output, devices, assigned, restarts, interruptions, status, "
    "submitted, started, ended"
)
_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT, state TEXT, words TEXT, directory TEXT, python TEXT, output TEXT,
    devices INTEGER, assigned TEXT, restarts INTEGER, interruptions INTEGER, status INTEGER,
    submitted REAL, started REAL, ended REAL
);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT);
"""


@dataclass(frozen=True)
class QueuedJob:
    """A job of the queue."""

    id: int
    name: str
    state: str  # waiting, running, cancelling, done, failed, cancelled
    words: tuple[str, ...]  # after `pulsetrain`
    directory: str  # in which the command runs
    python: str
    output: str  # the file with what it prints
    devices: int  # how many it needs
    assigned: tuple[int, ...]  # which it has, counted from 0
    restarts: int  # the most interruptions
    interruptions: int
    status: int | None  # of its last process
    submitted: float  # seconds since 1970
    started: float | None
    ended: float | None


def default_folder() -> Path:
    """The folder of the user's queue on this machine."""
    if os.environ.get(LOCATION):
        return Path(os.environ[LOCATION]).absolute()
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pulsetrain" / "queue"


def environment_here() -> dict[str, str]:
    """Pulsetrain's own variables in the environment of this process, without credentials."""
    return redacted({name: value for name, value in os.environ.items() if name.startswith("PULSETRAIN_")})


def taken_lock(path: Path) -> int | None:
    """An open file that holds the lock; None where another process holds it.

    Raises:
        ConfigurationError: the file cannot be written, or the file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"{path}: cannot be written: {error.strerror}; set {LOCATION} to another folder"
        ) from error
    taken = lock(descriptor)
    if taken:
        return descriptor
    os.close(descriptor)
    if taken is None:
        raise ConfigurationError(f"{path}: its file system has no locks; set {LOCATION} to a folder on a local disk")
    return None


class LocalQueue:
    """The jobs and the devices of a queue.

    Args:
        folder: made where it is missing.

    Raises:
        ConfigurationError: the folder cannot be written, or its file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._open(make=True) as connection:
                connection.executescript(_TABLES)
        except OSError as error:
            raise ConfigurationError(
                f"{folder}: the queue's folder cannot be written: {error.strerror}; set {LOCATION} to another"
            ) from error

    @property
    def file(self) -> Path:
        """The SQLite file."""
        return self.folder / "queue.sqlite"

    def lock_of(self, job: int) -> Path:
        """The file whose lock the job's processes hold."""
        return self.folder / f"{job}.lock"

    @property
    def lock(self) -> Path:
        """The file whose lock the queue's process holds."""
        return self.folder / "queue.lock"

    @property
    def devices(self) -> list[str] | None:
        """The devices, as CUDA_VISIBLE_DEVICES names them, or one empty text for each slot; None before they are set.

        Setting fewer than a waiting job needs is refused.
        """
        devices: list[str] | None = self._setting("devices")
        return devices

    @devices.setter
    def devices(self, names: Sequence[str]) -> None:
        for job in self.jobs(ended=False):
            if job.devices > len(names):
                raise ConfigurationError(
                    f"--devices {len(names)}: job {job.id} needs {job.devices}; cancel it with --cancel {job.id}, or "
                    "keep as many"
                )
        self._set("devices", list(names))

    @property
    def is_running(self) -> bool:
        """Whether the queue's process is there."""
        held = taken_lock(self.lock)
        if held is not None:
            os.close(held)
        return held is None

    @property
    def environment(self) -> dict[str, str]:
        """What the queue's process has noted of its environment, which the jobs get; see `environment_here`."""
        return self._setting("environment") or {}

    def note_environment(self) -> None:
        """Note the environment of this process, which is the queue's."""
        self._set("environment", environment_here())

    def _setting(self, name: str) -> Any:
        with self._open(write=False) as connection:
            row = connection.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def _set(self, name: str, value: object) -> None:
        with self._open() as connection:
            connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, json.dumps(value)))

    def add(
        self,
        commands: Sequence[Sequence[str]],
        *,
        name: str,
        directory: Path,
        python: str,
        output: Path,
        devices: int,
        restarts: int,
    ) -> list[int]:
        """Append jobs, all or none; returns their numbers.

        Args:
            commands: of each job, the words after `pulsetrain`.
            name: for the table.
            directory: in which the commands run.
            python: the interpreter.
            output: the folder of the files with what the jobs print.
            devices: how many each job needs.
            restarts: how often a job is started again after an interruption.
        """
        numbers = []
        with self._open() as connection:
            for words in commands:
                added = connection.execute(
                    "INSERT INTO jobs (name, state, words, directory, python, devices, assigned, restarts, "
                    "interruptions, submitted) VALUES (?, 'waiting', ?, ?, ?, ?, '[]', ?, 0, ?)",
                    (name, json.dumps(list(words)), str(directory), python, devices, restarts, time.time()),
                )
                number = int(added.lastrowid or 0)
                path = str(output.absolute() / f"local-{number}.txt")
                connection.execute("UPDATE jobs SET output = ? WHERE id = ?", (path, number))
                numbers.append(number)
        return numbers

    def jobs(self, *, ended: bool = True) -> list[QueuedJob]:
        """The jobs in the order of submission.

        Args:
            ended: whether those that have ended are among them.
        """
        return self._select("" if ended else f"WHERE state NOT IN {ENDED!r}")

    def job(self, number: int) -> QueuedJob:
        """The job with this number.

        Raises:
            ConfigurationError: there is none.
        """
        found = self._select("WHERE id = ?", number) if number in _NUMBERS else []
        if not found:
            raise ConfigurationError(f"job {number}: is not in the queue; --status lists the jobs")
        return found[0]

    def _select(self, condition: str, *values: object) -> list[QueuedJob]:
        with self._open(write=False) as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM jobs {condition} ORDER BY id", values).fetchall()
        found = []
        for row in rows:
            entries: dict[str, Any] = dict(zip(_COLUMNS.split(", "), row, strict=True))
            entries |= {name: tuple(json.loads(entries[name])) for name in ("words", "assigned")}
            found.append(QueuedJob(**entries))
        return found

    def start(self, number: int, assigned: Sequence[int]) -> bool:
        """Note that a waiting job runs on these devices; False where it was cancelled meanwhile."""
        with self._open() as connection:
            changed = connection.execute(
                "UPDATE jobs SET state = 'running', assigned = ?, started = ?, ended = NULL "
                "WHERE id = ? AND state = 'waiting'",
                (json.dumps(list(assigned)), time.time(), number),
            )
        return changed.rowcount == 1

    def end(self, number: int, state: str, status: int | None) -> None:
        """Note that a running job has ended; one that was being cancelled is cancelled."""
        with self._open() as connection:
            connection.execute(
                "UPDATE jobs SET state = CASE state WHEN 'cancelling' THEN 'cancelled' ELSE ? END, status = ?, "
                "ended = ?, assigned = '[]' WHERE id = ? AND state IN ('running', 'cancelling')",
                (state, status, time.time(), number),
            )

    def interrupt(self, number: int, status: int | None) -> None:
        """Note that a running job was killed or stopped: it waits again, unless that has happened too often."""
        with self._open() as connection:
            connection.execute(
                "UPDATE jobs SET interruptions = interruptions + (state = 'running'), status = ?, assigned = '[]', "
                "ended = ?, "
                "state = CASE WHEN state = 'cancelling' THEN 'cancelled' "
                "WHEN interruptions >= restarts THEN 'failed' ELSE 'waiting' END "
                "WHERE id = ? AND state IN ('running', 'cancelling')",
                (status, time.time(), number),
            )

    def cancel(self, number: int) -> QueuedJob:
        """Take a waiting job out, or have the process of a running one stop it; returns the job as it is then.

        Raises:
            ConfigurationError: there is no such job.
        """
        if number not in _NUMBERS:
            return self.job(number)  # which refuses it
        with self._open() as connection:
            connection.execute(
                "UPDATE jobs SET state = CASE state WHEN 'waiting' THEN 'cancelled' ELSE 'cancelling' END, "
                "ended = CASE state WHEN 'waiting' THEN ? END WHERE id = ? AND state IN ('waiting', 'running')",
                (time.time(), number),
            )
        return self.job(number)

    @contextmanager
    def _open(self, *, write: bool = True, make: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection in one transaction; `make` the file where it is missing.

        Raises:
            ConfigurationError: the file cannot be read or written; nothing has changed.
        """
        try:
            how = f"{self.file.absolute().as_uri()}?mode={'rwc' if make else 'rw'}"
            connection = sqlite3.connect(how, uri=True, timeout=60, isolation_level=None)
            try:
                connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                yield connection
                if connection.in_transaction:
                    connection.execute("COMMIT")
            finally:
                connection.close()  # rolls back what was not committed
        except sqlite3.OperationalError as error:  # such as a full disk
            raise ConfigurationError(
                f"{self.file}: cannot be read or written: {error}; make room on its disk, or set {LOCATION} to another "
                "folder"
            ) from error
        except sqlite3.DatabaseError as error:
            raise ConfigurationError(
                f"{self.file}: is damaged: {error}; move it away, or set {LOCATION} to another folder"
            ) from error
