"""Digests of what is written, taken while it is written, and of what is read."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Write", "digest_of", "write_digested"]

Write = Callable[[IO[bytes]], object]  # writes a file's content into it

_BUFFER = 1 << 20  # bytes: torch writes small tensors, and what stands between them, a few bytes at a time


def write_digested(put: Callable[[ReadableBuffer], int | None], write: Write) -> dict[str, Any]:
    """Pass on to `put` what `write` writes.

    Args:
        put: takes bytes, and returns how many of them it took.

    Returns:
        What a manifest says of the file: its size in bytes and its SHA-256.
    """
    passed = _Passed(put)
    file = io.BufferedWriter(passed, _BUFFER)
    try:
        write(file)
        file.flush()
    except Exception as error:
        # of a write that failed, torch says "unexpected pos"
        if passed.failure is not None and error is not passed.failure:
            raise passed.failure from None
        raise
    finally:
        passed.close()  # what a failed write left in the buffer must go nowhere
    return {"bytes": passed.size, "sha256": passed.digest.hexdigest()}


def digest_of(file: IO[bytes]) -> str:
    """SHA-256 of the rest of an open file."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # each of ours can be read into


class _Passed(io.RawIOBase):
    def __init__(self, put: Callable[[ReadableBuffer], int | None]) -> None:
        self.put, self.size, self.digest = put, 0, hashlib.sha256()
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        try:
            count = self.put(view)
        except OSError as error:
            self.failure = error
            raise
        taken = view.nbytes if count is None else count
        self.digest.update(view[:taken])
        self.size += taken
        return taken
