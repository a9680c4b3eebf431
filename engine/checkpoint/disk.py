"""Checkpoints on a disk of this machine: every call that changes the disk, in an order that survives a crash.

The order of writing: make a temporary folder; write and sync its files; sync the folder; rename it; sync its parent.
Without the syncs, a rename may reach the disk before the data written earlier, and a file before its folder entry.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pulsetrain.engine.checkpoint.digests import Write, write_digested
from pulsetrain.engine.checkpoint.manifest import MANIFEST, FileEntry
from pulsetrain.engine.logs import get_logger

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Disk", "sync", "write_file"]

_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_reported: set[int] = set()  # file systems that cannot sync folders
_SYNCED = 1 << 26  # bytes that are written before they are synced
_PARTIAL = ".partial-"  # prefix of names that readers ignore: half-written or half-deleted


class Disk:
    """Files of this machine, durable once written."""

    def make(self, folder: Path) -> None:
        for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            try:
                os.mkdir(missing)
            except FileExistsError:  # another process was faster
                pass
            sync(missing.parent)  # else a crash may lose the folder, with everything that was synced in it
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file")

    def begin(self, target: Path) -> None:
        self.abandon(target)  # an earlier attempt that failed
        os.mkdir(_partial(target))

    def write(self, target: Path, name: str, content: Write) -> FileEntry:
        return write_file(_partial(target) / name, content)

    def reopen(self, target: Path, name: str) -> IO[bytes]:
        return (_partial(target) / name).open("rb")

    def commit(self, target: Path, manifest: bytes) -> None:
        partial = _partial(target)
        write_file(partial / MANIFEST, lambda file: file.write(manifest))
        sync(partial)
        os.rename(partial, target)
        sync(target.parent)

    def abandon(self, target: Path) -> None:
        shutil.rmtree(_partial(target), ignore_errors=True)

    def replace(self, file: Path, content: bytes) -> None:
        self.replace_by(file, lambda partial: write_file(partial, lambda opened: opened.write(content)))

    def replace_by(self, file: Path, write: Callable[[Path], object]) -> None:
        """Replace a file atomically by the one that `write` makes under a temporary name and syncs."""
        partial = _partial(file)
        try:
            write(partial)
            os.replace(partial, file)
        except BaseException:
            try:
                os.unlink(partial)
            except OSError:  # it may not exist; readers ignore it in any case
                pass
            raise
        sync(file.parent)

    def replace_folder(self, folder: Path, write: Callable[[Path], object]) -> None:
        """Replace a folder by the one that `write` fills under a temporary name.

        If the process ends between the two renames, the name is missing until `recover_folder` returns the old one.
        """
        self.abandon(folder)
        partial, replaced = _partial(folder), _replaced(folder)
        os.mkdir(partial)
        try:
            write(partial)
            for path in (*partial.rglob("*"), partial):
                sync(path)
            shutil.rmtree(replaced, ignore_errors=True)
            if folder.exists():
                os.rename(folder, replaced)
            os.rename(partial, folder)
        except BaseException:
            self.abandon(folder)
            self.recover_folder(folder)
            raise
        sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def recover_folder(self, folder: Path) -> None:
        """Return the old folder if its replacement was interrupted."""
        if _replaced(folder).is_dir() and not folder.exists():
            os.rename(_replaced(folder), folder)
            sync(folder.parent)

    def delete(self, folders: Sequence[Path]) -> None:
        doomed = [_partial(folder.with_name(f"{folder.name}.deleted")) for folder in folders]
        for folder, renamed in zip(folders, doomed, strict=True):
            shutil.rmtree(renamed, ignore_errors=True)  # from an earlier attempt that failed
            os.rename(folder, renamed)
        if folders:
            sync(folders[0].parent)  # else a crash may undo a rename, and leave half a checkpoint under its old name
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

    def exists(self, folder: Path) -> bool:
        return folder.exists()

    def open(self, file: Path) -> IO[bytes]:
        return file.open("rb")

    def size(self, file: Path) -> int:
        return file.stat().st_size


def write_file(path: Path, write: Write) -> FileEntry:
    """Write and sync a file under a name that no reader uses yet; returns its size and digest."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        with ThreadPoolExecutor(1, "checkpoint sync") as beside:
            file = _SyncedEarly(descriptor, beside)
            written = write_digested(file.write, write)
            file.finish()
    finally:
        os.close(descriptor)
    return written


class _SyncedEarly:
    """Writes a file whose first parts are synced while the next ones are written: less is left for the last sync."""

    def __init__(self, descriptor: int, beside: Executor) -> None:
        self._descriptor, self._beside = descriptor, beside
        self._unsynced = 0  # bytes
        self._syncing: Future[None] | None = None

    def write(self, data: ReadableBuffer) -> int:
        count = os.write(self._descriptor, data)
        self._unsynced += count
        if self._unsynced >= _SYNCED and (self._syncing is None or self._syncing.done()):
            self._check()
            self._unsynced = 0
            self._syncing = self._beside.submit(os.fsync, self._descriptor)
        return count

    def finish(self) -> None:
        """Sync the rest."""
        self._check()
        os.fsync(self._descriptor)

    def _check(self) -> None:
        if self._syncing is not None:
            self._syncing.result()  # the system reports a failed sync once, and then forgets it


def sync(path: Path) -> None:
    """Make the content of a file, or the entries of a folder, durable.

    Some file systems (FUSE, network mounts) refuse that for folders, where it may not be needed: a warning says so
    once for each.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        status = os.fstat(descriptor)
        if error.errno not in _UNSUPPORTED or not stat.S_ISDIR(status.st_mode):
            raise
        if status.st_dev not in _reported:
            _reported.add(status.st_dev)
            get_logger("engine").warning(
                "this file system cannot sync folders: after a power cut the newest checkpoint may be missing",
                folder=str(path),
            )
    finally:
        os.close(descriptor)


def _replaced(folder: Path) -> Path:
    return _partial(folder.with_name(f"{folder.name}.replaced"))


def _partial(path: Path) -> Path:
    return path.with_name(f"{_PARTIAL}{path.name}")
