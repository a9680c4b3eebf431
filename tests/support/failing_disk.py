"""A folder in which the calls that write fail, as on a disk that is full or read-only."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_BY_PATH = ("mkdir", "rename", "replace", "open")
_BY_DESCRIPTOR = ("write", "pwrite", "fsync", "ftruncate")
_REMOVING = ("unlink", "remove", "rmdir")  # they work where a disk is only full


class _Raw(io.FileIO):
    take: Callable[[], None]

    def write(self, content: Any) -> int:
        self.take()
        return super().write(content)


class FailingDisk:
    """Counts the calls that write inside a folder, and lets them fail from one on.

    Args:
        folder: outside of it nothing fails.
        error: of `errno`, such as ENOSPC.
        fails_at: the number of the first call that fails, from 0; None for none.
        alone: whether the later calls work again.
    """

    def __init__(self, folder: Path, error: int, fails_at: int | None = None, *, alone: bool = False) -> None:
        self.folder, self.error, self.fails_at, self.alone = str(folder), error, fails_at, alone
        self.count = 0

    @contextmanager
    def mounted(self) -> Iterator[FailingDisk]:
        removing = () if self.error in (errno.ENOSPC, errno.EDQUOT) else _REMOVING
        with pytest.MonkeyPatch.context() as patch:
            for name in (*_BY_PATH, *_BY_DESCRIPTOR, *removing):
                patch.setattr(os, name, self._failing(name, getattr(os, name)))
            patch.setattr(io, "open", self._open(io.open))
            patch.setattr(builtins, "open", io.open)
            yield self

    def _failing(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            writes = name != "open" or arguments[1] & (os.O_WRONLY | os.O_RDWR)
            folder = options.get("dir_fd")
            if writes and self._is_inside(arguments[0] if folder is None else folder):
                self._take()
            return real(*arguments, **options)

        return call

    def _open(self, real: Any) -> Any:
        def opened(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            if set(mode) <= set("rbt") or not self._is_inside(file):
                return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if not isinstance(file, int) and opener is None:
                self._take()
            raw = _Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            raw.take = self._take
            if buffering == 0:
                return raw
            buffer: Any = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

        return opened

    def _is_inside(self, file: Any) -> bool:
        try:
            path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.path.abspath(os.fsdecode(file))
        except OSError:
            return False
        return path.startswith(self.folder)

    def _take(self) -> None:
        number, self.count = self.count, self.count + 1
        if self.fails_at is not None and (number == self.fails_at or (number > self.fails_at and not self.alone)):
            raise OSError(self.error, os.strerror(self.error))
