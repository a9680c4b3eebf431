"""Standard output that may be closed by its reader: `pulsetrain events runs/a | head`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["until_closed"]


@contextmanager
def until_closed() -> Iterator[None]:
    """Print until the reader has had enough, and leave without a word then."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still buffered would be written, and fail, when Python exits
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.stdout.fileno())
        os.close(silence)
