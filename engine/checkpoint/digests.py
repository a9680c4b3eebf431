"""Digests of files, computed while they are written or read."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from pulsetrain.engine.checkpoint.manifest import FileEntry

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["PROGRESS", "Progress", "Write", "digest_of", "write_digested"]

Write = Callable[[IO[bytes]], object]  # writes the content of a file

_PIECE = 1 << 18  # bytes that are read at a time; a piece of this size is digested while it is written
_BUFFER = 1 << 20  # bytes: torch writes small tensors, and the bytes between them, a few at a time


@dataclass
class Progress:
    """What checkpoints have written and read in this process: grows while one is being saved or loaded."""

    pieces: int = 0


PROGRESS = Progress()


def write_digested(put: Callable[[ReadableBuffer], int | None], write: Write) -> FileEntry:
    """Pass what `write` writes to `put`.

    >>> content = io.BytesIO()
    >>> write_digested(content.write, lambda file: file.write(b"abc"))["bytes"]
    3

    Args:
        put: accepts bytes, and returns how many of them it has written.

    Returns:
        The manifest's entry for the file: its size in bytes and its SHA-256.
    """
    with ThreadPoolExecutor(1, "checkpoint digest") as beside:
        digesting = _Digesting(put, beside)
        file = io.BufferedWriter(digesting, _BUFFER)
        try:
            write(file)
            file.flush()
        except Exception as error:
            # torch reports a failed write as "unexpected pos"
            if digesting.failure is not None and error is not digesting.failure:
                raise digesting.failure from None
            raise
        finally:
            digesting.close()  # after a failed write, what is left in the buffer must not be written
    return {"bytes": digesting.size, "sha256": digesting.digest.hexdigest()}


def digest_of(file: IO[bytes]) -> str:
    """SHA-256 of the rest of an open file."""
    digest = hashlib.sha256()
    while piece := file.read(_PIECE):
        digest.update(piece)
        PROGRESS.pieces += 1
    return digest.hexdigest()


class _Digesting(io.RawIOBase):
    def __init__(self, put: Callable[[ReadableBuffer], int | None], beside: Executor) -> None:
        self.put, self.size, self.digest = put, 0, hashlib.sha256()
        self.failure: OSError | None = None
        self._beside = beside

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        hashing = self._beside.submit(self.digest.update, view) if view.nbytes >= _PIECE else None
        try:
            written = self._put_all(view)
        except OSError as error:
            self.failure = error
            raise
        finally:
            if hashing is not None:  # the memory may change after this call
                hashing.result()
        if hashing is None:
            self.digest.update(view)
        self.size += written
        return written

    def _put_all(self, view: memoryview) -> int:
        """Write every byte: a system may write fewer at a time."""
        written = 0
        while written < view.nbytes:
            count = self.put(view[written:] if written else view)
            written = view.nbytes if count is None else written + count
            PROGRESS.pieces += 1
        return written
