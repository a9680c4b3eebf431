"""Several processes that share out the trials of one sweep, in one folder: which of them are there.

Each holds the lock of its own file. A trial notes its owner: the sweep folder, by an id that does not depend on the
host, and the name of the worker, if there are several. A process of the same folder may continue the trial once the
owner has ended. The hosts of workers have to share locks, as NFS and Lustre (mounted with `flock`) do.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pulsetrain.engine.errors import ConfigurationError, RunFolderError
from pulsetrain.engine.file_lock import lock
from pulsetrain.handlers.run_files.run_folder import replace_file

__all__ = ["ID", "check_name", "folder_of", "has_left", "owned_by", "owner_of"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
ID = "sweep.id"  # made once the study is there
_ATTEMPTS, _PAUSE = 20, 0.25  # another worker that looks whether this one is there holds the lock for a moment


def check_name(worker: str) -> None:
    """Check a worker's name.

    Raises:
        ConfigurationError: the name cannot be part of a file's name.
    """
    if not _NAME.fullmatch(worker):
        raise ConfigurationError(f"--worker {worker!r}: needs letters, digits, hyphens and dots, such as 0 or gpu-1")


def owner_of(folder: Path, worker: str | None) -> dict[str, str | None]:
    """What a trial notes of the process that trains it.

    Call it while no other process does: the first one gives the folder its id.

    Args:
        folder: of the sweep.
        worker: the name of the process among several; None if it is the only one.
    """
    file = folder / ID
    if not file.exists():
        replace_file(file, uuid.uuid4().hex.encode())
    return {"id": file.read_text(encoding="utf-8"), "worker": worker, "folder": str(folder.resolve())}


@contextmanager
def owned_by(folder: Path, worker: str) -> Iterator[None]:
    """While this process is the worker with that name.

    Raises:
        RunFolderError: another process has the name.
    """
    check_name(worker)
    descriptor = os.open(_file(folder, worker), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        for _ in range(_ATTEMPTS):
            if lock(descriptor) is not False:
                break
            time.sleep(_PAUSE)
        else:
            raise RunFolderError(
                f"{folder}: another process is the worker {worker} of this sweep; give this one another name"
            )
        yield
    finally:
        os.close(descriptor)


def has_left(folder: Path, owner: object, own: Mapping[str, str | None]) -> bool:
    """Whether the process with that owner has ended, and left its trial to this one; False where that is not known.

    Args:
        folder: of this process, which holds its lock.
        owner: what the trial notes.
        own: what this process notes.
    """
    if not isinstance(owner, dict) or owner.get("id") != own["id"]:
        return False
    if own["worker"] is None or owner["worker"] == own["worker"]:  # this process has the lock of the owner
        return True
    descriptor = os.open(_file(folder, owner["worker"]), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        return lock(descriptor, shared=True) is True
    finally:
        os.close(descriptor)


def folder_of(owner: object) -> Path | None:
    """The sweep's folder, of a trial's owner; None if it is not known."""
    return Path(owner["folder"]) if isinstance(owner, dict) else None


def _file(folder: Path, worker: str | None) -> Path:
    return folder / ("sweep.lock" if worker is None else f"sweep.{worker}.lock")
