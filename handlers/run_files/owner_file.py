"""The file that names the owner of a run folder, and keeps other processes out while the owner lives.

The owner holds an advisory lock on the file, which ends with its process. Where hosts do not see each other's locks,
the owner touches the file at intervals instead: one that nobody touches has no owner any more.
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import msgspec

from pulsetrain.engine.distributed.launcher import slurm_job
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.file_lock import lock, unlock
from pulsetrain.engine.file_system import file_system_of, report_once
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.run_files.owner_process import beginning, decoded, has_ended, processes
from pulsetrain.handlers.run_files.run_folder import replace_file

__all__ = ["OWNER_FILE", "OwnerFile"]

OWNER_FILE = ".owner"  # while a run owns the folder
_BEAT = 5.0  # seconds between two touches
_SILENT = 40.0  # seconds without one, after which the owner has ended; shorter than others wait for this process
_SETTLE = 1.0  # seconds in which another process that takes the file at the same moment is done with it


class OwnerFile:
    """The file in a folder that this process owns, until it is released.

    Args:
        folder: the folder, which exists; resolved.
        place: the handler's class name, and
        named: the folder as the user wrote it, for the message.
        wait: until no other process owns the folder.

    Raises:
        RunFolderError: another process owns it; the message says which.
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, place: str = "", named: str = "", *, wait: bool = False) -> None:
        self._path, self._place, self._named = folder / OWNER_FILE, place or "run", named or str(folder)
        self._content = _description()
        self._descriptor: int | None = None  # of the locked file
        self._released = threading.Event()
        self._heart: threading.Thread | None = None
        system = file_system_of(folder)
        if not system.locks_one_host and _has_locks(folder):
            self._lock(wait)
        else:
            report_once(
                system.type,
                "this file system has no locks between hosts: the owner of a run folder touches a file there every "
                f"{_BEAT:g} s, and a folder whose owner was killed is free after {_SILENT:g} s",
            )
            self._take(wait)

    def release(self) -> None:
        """The folder has no owner any more."""
        self._released.set()
        if self._descriptor is not None:
            with suppress(OSError):
                os.unlink(self._path)
            unlock(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        elif self._heart is not None:
            if self._heart is not threading.current_thread():  # which may have deleted the owner
                self._heart.join()
            with suppress(OSError):
                if self._path.read_bytes() == self._content:
                    os.unlink(self._path)

    def leave(self) -> None:
        """In a forked process, which owns nothing: its copy of the descriptor would outlive the owner."""
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _lock(self, wait: bool) -> None:
        """Own the folder by a lock."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if lock(descriptor, wait=wait) is False:
                    raise self._refused(os.pread(descriptor, 4096, 0))
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    break
            except OSError as error:
                os.close(descriptor)
                if error.errno in (errno.ENOENT, errno.ESTALE):  # the last owner has removed it meanwhile
                    continue
                raise
            os.close(descriptor)  # as above, and another process has made it again
        self._descriptor = descriptor
        with suppress(OSError):  # a full disk: the lock holds without its description
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, self._content, 0)
            os.fsync(descriptor)  # else another host sees it later

    def _take(self, wait: bool) -> None:
        """Own the folder by touching the file from now on."""
        while not self._created():
            there = self._read()
            if there is None:
                continue
            if not has_ended(there) and self._is_touched():
                if not wait:
                    raise self._refused(there)
                continue
            replace_file(self._path, self._content)
            time.sleep(_SETTLE)
            if self._read() == self._content:  # the last process that replaced it owns it
                break
        self._heart = threading.Thread(target=self._beat, name="pulsetrain-owner", daemon=True)
        self._heart.start()

    def _created(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, self._content)
        except OSError:
            os.unlink(self._path)
            raise
        finally:
            os.close(descriptor)
        return True

    def _read(self) -> bytes | None:
        """The content; None if the file is not there."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def _is_touched(self) -> bool:
        """Whether its owner touches the file, by looking long enough: the clocks of two hosts may differ."""
        first, until = self._sign(), time.monotonic() + _SILENT
        while time.monotonic() < until:
            if self._sign() != first:
                return first is not None
            time.sleep(min(_BEAT, 1.0))
        return False

    def _sign(self) -> object:
        """What changes when the file is touched or replaced."""
        try:
            with self._path.open("rb") as file:  # opening it asks a server for the time, which may be cached
                status = os.fstat(file.fileno())
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _beat(self) -> None:
        while not self._released.wait(_BEAT):
            try:
                if self._read() != self._content:
                    get_logger("handlers").error(
                        "another process owns the run folder now, since this one did not touch its file in time: both "
                        "may write there; stop one of them",
                        folder=self._named,
                    )
                    return
                os.utime(self._path)
            except OSError:  # a server that does not answer at the moment
                continue

    def _refused(self, content: bytes) -> RunFolderError:
        rule = (
            f"is in use{_described(content)}; wait for the end of that run, by train(wait=True) or --wait on the "
            "command line, or choose another folder"
        )
        return RunFolderError(rule, self._place, folder=self._named)


def _has_locks(folder: Path) -> bool:
    with tempfile.TemporaryFile(dir=folder) as probe:
        return lock(probe.fileno()) is not None


def _description() -> bytes:
    facts: dict[str, object] = {"pid": os.getpid(), "host": socket.gethostname()}
    facts |= {"job": slurm_job()} if slurm_job() else {}
    facts |= {"since": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "id": uuid.uuid4().hex, "processes": processes()}
    facts |= {"began": beginning(os.getpid())}
    return msgspec.json.encode(facts) + b"\n"


def _described(content: bytes) -> str:
    try:
        owner = decoded(content)
        job = f" in Slurm job {owner['job']}" if owner.get("job") else ""
        job += " (this one)" if job and owner["job"] == slurm_job() else ""
        return f" by process {owner['pid']} on {owner['host']}{job} since {owner['since']}"
    except (ValueError, KeyError):  # it is just being written
        return " by another process"
