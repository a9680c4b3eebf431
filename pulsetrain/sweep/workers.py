"""Several processes that share out the trials of one sweep, in one folder: which of them are there.

Each holds the lock of its own file. A trial notes the name of its worker, and another worker may continue it once that
one has ended. Their hosts have to share locks, as NFS and Lustre (mounted with `flock`) do.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pulsetrain.engine.errors import ConfigurationError, RunFolderError
from pulsetrain.engine.file_lock import lock

__all__ = ["folder_of", "has_ended", "owned_by", "owner_name"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_PREFIX = "worker:"
_ATTEMPTS, _PAUSE = 20, 0.25  # another worker that looks whether this one is there holds the lock for a moment


def owner_name(worker: str) -> str:
    """What a trial notes.

    Raises:
        ConfigurationError: the name cannot be part of a file's name.
    """
    if not _NAME.fullmatch(worker):
        raise ConfigurationError(f"--worker {worker!r}: needs letters, digits, hyphens and dots, such as 0 or gpu-1")
    return f"{_PREFIX}{worker}"


@contextmanager
def owned_by(folder: Path, worker: str) -> Iterator[None]:
    """While this process is the worker with that name.

    Raises:
        RunFolderError: another process has the name.
    """
    owner_name(worker)
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


def has_ended(folder: Path, owner: object) -> bool:
    """Whether a trial's owner is a worker that is not there any more; False where that is not known."""
    if not isinstance(owner, str) or folder_of(owner) is not None:
        return False
    descriptor = os.open(_file(folder, owner.removeprefix(_PREFIX)), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        return lock(descriptor, shared=True) is True
    finally:
        os.close(descriptor)


def folder_of(owner: object) -> Path | None:
    """The sweep's folder, of a trial's owner that is a host with a folder; None if it is a worker, or not known."""
    folder = owner.partition(":")[2] if isinstance(owner, str) else ""
    return Path(folder) if folder.startswith("/") else None


def _file(folder: Path, worker: str) -> Path:
    return folder / f"sweep.{worker}.lock"
