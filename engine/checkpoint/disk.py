"""Checkpoints on a disk of this machine: every call that changes it, in the order that survives a crash.

The order of writing: a temporary folder, its files, each synced, the folder synced, renamed, the parent synced. A
rename may reach the disk before what was written ahead of it, and a name after what it names: the syncs forbid it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from pulsetrain.engine.checkpoint.digesting import Write, write_digested
from pulsetrain.engine.checkpoint.manifest import MANIFEST

__all__ = ["Disk", "sync", "write_file"]

_PARTIAL = ".partial-"  # begins the name of what does not count: half-written or half-deleted


class Disk:
    """Files of this machine, durable when written."""

    def make(self, folder: Path) -> None:
        for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            try:
                os.mkdir(missing)
            except FileExistsError:  # another process was faster
                pass
            sync(missing.parent)  # else a crash may take the folder, with all that was synced in it
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file")

    def commit(self, target: Path, name: str, state: Write, manifest: Callable[[dict[str, Any]], bytes]) -> None:
        partial = _partial(target)
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt that failed
        os.mkdir(partial)
        try:
            written = write_file(partial / name, state)
            content = manifest(written)
            write_file(partial / MANIFEST, lambda file: file.write(content))
            sync(partial)
            os.rename(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync(target.parent)

    def replace(self, file: Path, content: bytes) -> None:
        self.replace_by(file, lambda partial: write_file(partial, lambda opened: opened.write(content)))

    def replace_by(self, file: Path, write: Callable[[Path], object]) -> None:
        """Replace a file by the one that `write` makes, and syncs, under another name."""
        partial = _partial(file)
        try:
            write(partial)
            os.replace(partial, file)
        except BaseException:
            _unlink(partial)
            raise
        sync(file.parent)

    def delete(self, folders: Sequence[Path]) -> None:
        doomed = [_partial(folder.with_name(f"{folder.name}.deleted")) for folder in folders]
        for folder, renamed in zip(folders, doomed, strict=True):
            shutil.rmtree(renamed, ignore_errors=True)  # of an earlier attempt that failed
            os.rename(folder, renamed)
        if folders:
            sync(folders[0].parent)  # else a crash may undo the renaming, and leave half of what it named
        for renamed in doomed:
            shutil.rmtree(renamed, ignore_errors=True)

    def clean(self, folder: Path) -> None:
        for leftover in folder.glob(f"{_PARTIAL}*"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                os.unlink(leftover)

    def subfolders(self, folder: Path) -> list[str]:
        return [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []

    def taken(self, folder: Path) -> bool:
        return folder.exists()

    def open(self, file: Path) -> IO[bytes]:
        return file.open("rb")

    def size(self, file: Path) -> int:
        return file.stat().st_size


def write_file(path: Path, write: Write) -> dict[str, Any]:
    """Write a file, replacing none that counts, and sync it; returns its size and digest."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        written = write_digested(lambda data: os.write(descriptor, data), write)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return written


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, survive a crash from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink(path: Path) -> None:
    try:
        os.unlink(path)
    except OSError:  # it may not have been made; what begins so does not count
        pass


def _partial(path: Path) -> Path:
    return path.with_name(f"{_PARTIAL}{path.name}")
