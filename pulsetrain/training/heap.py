"""Free memory of the C heap, given back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

__all__ = ["give_back_free_memory"]

KEPT = 64 * 2**20  # bytes that may stay free, for the next step to use


class _Usage(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip
    fordblks: int  # bytes in free blocks


def give_back_free_memory() -> bool:
    """Give free memory of the heap back where there is much of it; returns whether it did.

    Activations are freed in another order than they were allocated. Whatever small block stays between them keeps the
    C library from giving the rest back, and the next step finds no place that is large enough and takes more: the
    process grows although nothing leaks. Here free pages are given back wherever they are, in about 40 ms per 100 MB,
    and fetching them again takes as long. Only glibc can do this; elsewhere nothing happens.
    """
    functions = _functions()
    if functions is None:
        return False
    usage, trim = functions
    if usage().fordblks < KEPT:
        return False
    trim(0)
    return True


@cache
def _functions() -> tuple[Callable[[], _Usage], Callable[[int], int]] | None:
    try:
        library = ctypes.CDLL(None)
        usage, trim = library.mallinfo2, library.malloc_trim  # glibc 2.33
    except (OSError, TypeError, AttributeError):
        return None
    usage.restype = _Usage
    trim.argtypes = [ctypes.c_size_t]
    return usage, trim
