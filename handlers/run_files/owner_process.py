"""The process that an owner file names, and whether it is known to have ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["beginning", "decoded", "has_ended", "processes"]


def has_ended(content: bytes) -> bool:
    """Whether the owner is known to have ended: the number of a process says nothing on other hosts."""
    try:
        owner = decoded(content)
        if not processes() or owner["processes"] != processes():
            return False
        process = int(owner["pid"])
        os.kill(process, 0)
        began = owner.get("began")
        return bool(began) and began != (beginning(process) or began)  # else its number was given to another process
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError, OverflowError):  # a damaged file
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


def beginning(process: int) -> int | None:
    """When a process of this host began, in clock ticks since the start of the host; None if it is not known."""
    try:
        # the name, in parentheses, may hold any character; the time is the 22nd entry
        return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
