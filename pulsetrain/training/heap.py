"""Free memory of the C heap: kept from step to step, and given back to the system where the process has grown."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

__all__ = ["Heap", "keep_freed_memory"]

GROWTH = 64 * 2**20  # bytes that the process may grow by before free memory is given back
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of glibc's mallopt
_MOST_TRIM, _MOST_MMAP = 2**31 - 1, 2**25  # bytes, the largest that it accepts
_OF_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")  # environment variables of glibc


@cache
def keep_freed_memory() -> bool:
    """Let this process keep the memory that a step on the CPU frees, for the next step; returns whether it does.

    By default, glibc gives the end of its heap back to the system as soon as a few MB there are free, which is the case
    at the end of each backward pass. The next step fetches the pages again: thousands of page faults in each step, with
    zeros that the kernel writes. Nothing is changed where the environment decides on it (such as
    `MALLOC_TRIM_THRESHOLD_`, or `glibc.malloc` in `GLIBC_TUNABLES`), or with another C library.
    """
    if any(name in os.environ for name in _OF_USER) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    if _functions() is None:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # either option ends the automatic choice of the other: both are set, or blocks above 128 KiB were mapped each time
    return bool(mallopt(_MMAP_THRESHOLD, _MOST_MMAP)) and bool(mallopt(_TRIM_THRESHOLD, _MOST_TRIM))


class _Usage(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip
    fordblks: int  # bytes in free blocks


class Heap:
    """The C heap of a process whose steps allocate and free much memory.

    Activations are freed in another order than they were allocated. Whatever small block stays between them keeps the
    C library from giving the rest back, and the next step finds no place that is large enough and takes more: the
    process grows although nothing leaks. Here free pages are given back wherever they are, in about 40 ms per 100 MB,
    and fetching them again takes as long: this is done only after the process has grown. Only glibc on Linux can do
    it; elsewhere nothing happens.
    """

    def __init__(self) -> None:
        self._usual: int | None = None  # bytes of the process, as it was found first
        self._gave_back = False  # the last time

    def trim(self) -> bool:
        """Give free memory back if the process has grown since the first call; returns whether it did.

        Where it is as large at the next call, the memory is in use: then this size is the usual one.
        """
        functions = _functions()
        if functions is None:
            return False
        usage, trim = functions
        size = _resident()
        if self._usual is None:
            self._usual = size
        if size < self._usual + GROWTH or usage().fordblks < GROWTH:
            self._gave_back = False
            return False
        if self._gave_back:
            self._usual, self._gave_back = size, False
            return False
        trim(0)
        self._gave_back = True
        return True


def _resident() -> int:
    """The bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@cache
def _functions() -> tuple[Callable[[], _Usage], Callable[[int], int]] | None:
    try:
        library = ctypes.CDLL(None)
        usage, trim = library.mallinfo2, library.malloc_trim  # glibc 2.33
        _resident()
    except (OSError, TypeError, AttributeError):
        return None
    usage.restype = _Usage
    trim.argtypes = [ctypes.c_size_t]
    return usage, trim
