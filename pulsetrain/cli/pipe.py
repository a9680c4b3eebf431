"""Printing to a reader that may close the pipe: `pulsetrain events runs/a | head`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["until_closed"]


@contextmanager
def until_closed() -> Iterator[None]:
    """Print until the reader closes the pipe; then leave without an error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # otherwise Python would write the buffered rest at exit, and fail
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.stdout.fileno())
        os.close(silence)
