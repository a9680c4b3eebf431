"""Which file system a folder is on, and whether hosts see each other's locks there."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulsetrain.engine import file_system
from pulsetrain.engine.file_system import file_system_of

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:40 / /data rw,relatime shared:2 master:1 - nfs4 server:/data rw,vers=4.2,local_lock=none
24 22 0:41 / /scratch rw - lustre ost@tcp:/scratch rw,flock
25 22 0:42 / /scratch/one rw - lustre ost@tcp:/one rw,localflock
26 22 0:43 / /home rw - nfs server:/home rw,vers=3,local_lock=flock
27 22 0:44 / /with\040blank rw - fuse.sshfs host: rw
28 22 0:45 / /data/tmp rw - tmpfs tmpfs rw
29 22 0:46 / /data/tmp rw - beegfs beegfs_nodev rw
30 22 0:47 / /box rw - fuse.fuse-overlayfs x rw
garbage
"""


@pytest.mark.parametrize(
    ("path", "type", "is_shared", "locks_one_host"),
    [
        ("/etc", "ext4", False, False),
        ("/data", "nfs4", True, False),
        ("/data/runs/a", "nfs4", True, False),
        ("/database", "ext4", False, False),
        ("/data/tmp/x", "beegfs", True, False),
        ("/scratch/x", "lustre", True, False),
        ("/scratch/one/x", "lustre", True, True),
        ("/home/me", "nfs", True, True),
        ("/with blank/x", "fuse.sshfs", True, False),
        ("/box", "fuse.fuse-overlayfs", False, False),
    ],
)
def test_the_innermost_mount_counts(
    path: str, type: str, is_shared: bool, locks_one_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    monkeypatch.setattr(file_system, "_MOUNTS", mounts)
    found = file_system_of(Path(path))
    assert (found.type, found.is_shared, found.locks_one_host) == (type, is_shared, locks_one_host)


def test_a_link_leads_to_the_file_system_of_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mounts, target, link = tmp_path / "mountinfo", tmp_path / "target", tmp_path / "link"
    target.mkdir()
    link.symlink_to(target)
    mounts.write_text(f"1 0 8:1 / / rw - ext4 a rw\n2 1 0:4 / {target} rw - nfs4 b rw\n")
    monkeypatch.setattr(file_system, "_MOUNTS", mounts)
    assert file_system_of(link / "runs").type == "nfs4"


def test_where_the_system_does_not_say_a_folder_is_taken_for_a_local_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file_system, "_MOUNTS", Path("/no such file"))
    assert not file_system_of(Path("/")).is_shared
