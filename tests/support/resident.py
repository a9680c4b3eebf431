"""How much of a mapped file is in the memory of this process, as the kernel counts it."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor


def resident_bytes(inside: Tensor) -> int:
    """Rss of the mapping that holds a tensor."""
    address, found = inside.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no mapping holds the tensor")
