"""Ports for servers of tests."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

__all__ = ["free_port"]

# below those that the kernel gives to connections and to sockets that are bound to port 0: it could give a port that
# was free a moment ago to any other program
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A port on which nobody listens; the next 11,999 calls, of whichever process, return others."""
    place = Path(tempfile.gettempdir()) / f"pulsetrain-tests-{os.getuid()}.port"
    with place.open("a+") as last:
        fcntl.flock(last, fcntl.LOCK_EX)
        last.seek(0)
        port = int(last.read() or _PORTS[-1])
        for _ in _PORTS:
            port = port + 1 if port + 1 in _PORTS else _PORTS[0]
            if _is_free(port):
                break
        else:
            raise AssertionError(f"every port of {_PORTS} is in use")
        last.truncate(0)
        last.write(str(port))
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True
