"""How much memory is left for the tensors of this process."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

__all__ = ["available"]

_MEMINFO, _STATUS, _CGROUP = Path("/proc/meminfo"), Path("/proc/self/status"), Path("/sys/fs/cgroup")


def available(device: torch.device) -> int | None:
    """The bytes that can still be allocated; None where the system does not say.

    On the CPU, the least of: what the machine has left, what the container has left (cgroup v2), and what the limit of
    the process's address space leaves (ulimit -v).
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    left = [_field(_MEMINFO, "MemAvailable"), _left_in_container(), _left_by_limit()]
    return min((each for each in left if each is not None), default=None)


def _field(file: Path, name: str) -> int | None:
    """A line such as `MemAvailable:  16384 kB`, in bytes."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    found = next((line for line in lines if line.startswith(f"{name}:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def _left_in_container() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        statistics = (_CGROUP / "memory.stat").read_text(encoding="ascii").split()
    except OSError:
        return None
    if limit == "max":
        return None
    # not memory.current: it counts the files that the kernel caches and would drop
    return max(int(limit) - int(statistics[statistics.index("anon") + 1]), 0)


def _left_by_limit() -> int | None:
    limit, used = resource.getrlimit(resource.RLIMIT_AS)[0], _field(_STATUS, "VmSize")
    return None if limit == resource.RLIM_INFINITY or used is None else max(limit - used, 0)
