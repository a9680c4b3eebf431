"""What kind of file system a folder is on, and which services it lacks there."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pulsetrain.engine.logs import get_logger

__all__ = ["FileSystem", "file_system_of", "report_once"]

_MOUNTS = Path("/proc/self/mountinfo")
_SHARED = frozenset(
    (
        "nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "cifs", "smb3", "smbfs", "9p", "afs",
        "panfs", "orangefs", "pvfs2", "wekafs", "dvs", "glusterfs",
    )
)  # fmt: skip
_LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.lxcfs")


class FileSystem(NamedTuple):
    """A mounted file system; the type is empty where it is not known.

    >>> FileSystem("nfs4", ("rw", "local_lock=flock")).is_shared, FileSystem("ext4").is_shared
    (True, False)
    """

    type: str = ""
    options: tuple[str, ...] = ()

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may have mounted it, too."""
        return self.type in _SHARED or (self.type.startswith("fuse.") and self.type not in _LOCAL_FUSE)

    @property
    def locks_one_host(self) -> bool:
        """Whether it was mounted so that another host does not see the locks of this one."""
        lacks = {"local_lock=all", "local_lock=flock", "nolock", "localflock"}
        return self.is_shared and not lacks.isdisjoint(self.options)


def file_system_of(path: Path) -> FileSystem:
    """The file system of a path, which need not exist.

    >>> file_system_of(Path("/proc/self/no such file")).type in ("proc", "")
    True
    """
    return _of_mounts(_mounts(), os.path.realpath(path))


@cache
def report_once(type: str, what: str, reason: str = "") -> None:
    """Say what differs on a file system of this type, once in a process."""
    get_logger("engine").info(what, file_system=type or "unknown", **({"reason": reason} if reason else {}))


def _mounts() -> str:
    try:
        return _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # not Linux
        return ""


def _of_mounts(mounts: str, path: str) -> FileSystem:
    """That of the innermost mount point, and of the last one mounted there.

    >>> root, data = "1 0 8:1 / / rw - ext4 /dev/sda rw", "2 1 0:5 / /data rw,noatime - nfs4 host:/a rw"
    >>> [_of_mounts(root + chr(10) + data, path).type for path in ("/data/runs/a", "/database")]
    ['nfs4', 'ext4']
    """
    found, length = FileSystem(), -1
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, described = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(described) < 3:
            continue
        point = _unescaped(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= length:
            options = (*fields[5].split(","), *described[2].split(","))
            found, length = FileSystem(described[0], options), len(point)
    return found


def _unescaped(text: str) -> str:
    for code, letter in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        text = text.replace(code, letter)
    return text
