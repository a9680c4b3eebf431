"""Files that cannot grow, as on a disk that is full."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["largest_file"]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file can grow beyond that many bytes.

    Nothing that is imported meanwhile is compiled into a file: Python 3.11 keeps one that was cut off, and each
    later import of it fails.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
