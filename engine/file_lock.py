"""Advisory locks on open files, which end with the process that took them."""

from __future__ import annotations

import errno
import fcntl

__all__ = ["lock", "unlock"]

_TAKEN = (errno.EAGAIN, errno.EACCES)


def lock(descriptor: int, *, wait: bool = False, shared: bool = False) -> bool | None:
    """Lock an open file; False if it is locked already, through another descriptor; None if files have no locks there.

    The lock belongs to what `os.open` made, which a forked process shares: there the descriptor has to be closed, or
    the lock outlives this process.

    Args:
        descriptor: of the file; it must not be inherited by programs that this process starts (O_CLOEXEC).
        wait: until nothing else holds the lock.
        shared: with others that share it, too; a lock that is not shared excludes them.

    >>> import os, tempfile
    >>> file = tempfile.NamedTemporaryFile()
    >>> first, second = os.open(file.name, os.O_RDWR), os.open(file.name, os.O_RDWR)
    >>> lock(first), lock(second)
    (True, False)
    >>> unlock(first)
    >>> lock(second)
    True
    >>> lock(second, shared=True), lock(first, shared=True), lock(first)
    (True, True, False)
    >>> os.close(first); os.close(second); file.close()
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return False if error.errno in _TAKEN else None  # ENOLCK (NFS), ENOSYS (Lustre), EOPNOTSUPP
    return True


def unlock(descriptor: int) -> None:
    """Release the lock, also for a process that was forked just now and still has the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError:  # a file system without locks
        pass
