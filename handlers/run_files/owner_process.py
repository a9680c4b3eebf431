"""The process that an owner file names, and whether it is known to have ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["decoded", "has_ended", "processes"]


def has_ended(content: bytes) -> bool:
    """Whether the owner is known to have ended: the number of a process says nothing on other hosts."""
    try:
        owner = decoded(content)
        if not processes() or owner["processes"] != processes():
            return False
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError, OverflowError):  # a damaged file
        return False
    return False


def decoded(content: bytes) -> dict[str, Any]:
    """What the file says of the owner.

    Raises:
        ValueError: it is not a description.
    """
    found = msgspec.json.decode(content)
    if not isinstance(found, dict):
        raise ValueError(f"{found!r} does not describe an owner")
    return found


def processes() -> str:
    """Within which the numbers of processes differ: a start of a host, or of a container; empty if it is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
