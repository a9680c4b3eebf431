"""Advisory locks on open files, which end with the process that took them."""

from __future__ import annotations

import errno
import fcntl
from functools import cache

from pulsetrain.engine.logs import get_logger

__all__ = ["lock", "unlock"]

_TAKEN = (errno.EAGAIN, errno.EACCES)


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file; False if it is locked already, through another descriptor.

    The lock belongs to what `os.open` made, which a forked process shares: there the descriptor has to be closed, or
    the lock outlives this process. A file system without locks counts as unlocked, and a warning says so once.

    Args:
        descriptor: of the file; it must not be inherited by programs that this process starts (O_CLOEXEC).
        wait: until nothing else holds the lock.

    >>> import os, tempfile
    >>> file = tempfile.NamedTemporaryFile()
    >>> first, second = os.open(file.name, os.O_RDWR), os.open(file.name, os.O_RDWR)
    >>> lock(first), lock(second)
    (True, False)
    >>> unlock(first)
    >>> lock(second)
    True
    >>> os.close(first); os.close(second); file.close()
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        _warn_that_nothing_is_locked(error.strerror or str(error))
    return True


def unlock(descriptor: int) -> None:
    """Release the lock, also for a process that was forked just now and still has the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError:  # a file system without locks
        pass


@cache
def _warn_that_nothing_is_locked(reason: str) -> None:
    get_logger("engine").warning(
        "this file system has no locks: nothing prevents two runs from writing into one folder", reason=reason
    )
