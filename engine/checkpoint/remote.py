"""Checkpoints at a URL, through fsspec. Such stores have no rename: writing the manifest is what commits a checkpoint.

The manifest is written last and deleted first: a folder without one is not a checkpoint. The store must make each
object visible as a whole and durable when it is closed, and list every object that has been written. S3 does both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from pulsetrain.engine.checkpoint.digests import Write, write_digested
from pulsetrain.engine.checkpoint.locations import CheckpointUrl
from pulsetrain.engine.checkpoint.manifest import MANIFEST, FileEntry, is_checkpoint_name

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["Remote"]


class Remote:
    """Files in the store of a URL."""

    def __init__(self, url: CheckpointUrl) -> None:
        from fsspec.core import url_to_fs

        self._store: AbstractFileSystem = url_to_fs(url)[0]

    def make(self, folder: CheckpointUrl) -> None:
        """Does nothing: such stores have no empty folders."""

    def begin(self, target: CheckpointUrl) -> None:
        self._store.makedirs(self._path(target), exist_ok=True)

    def write(self, target: CheckpointUrl, name: str, content: Write) -> FileEntry:
        with self._store.open(self._path(target / name), "wb") as file:
            return write_digested(file.write, content)

    def reopen(self, target: CheckpointUrl, name: str) -> IO[bytes]:
        return self.open(target / name)

    def commit(self, target: CheckpointUrl, manifest: bytes) -> None:
        self._store.pipe_file(self._path(target / MANIFEST), manifest)

    def abandon(self, target: CheckpointUrl) -> None:
        self._remove(target)

    def replace(self, file: CheckpointUrl, content: bytes) -> None:
        self._store.pipe_file(self._path(file), content)

    def delete(self, folders: Sequence[CheckpointUrl]) -> None:
        for folder in folders:
            self._store.rm_file(self._path(folder / MANIFEST))
            self._remove(folder)

    def clean(self, folder: CheckpointUrl) -> None:
        committed = set(self.subfolders(folder))
        for name in self._folders(folder):
            if is_checkpoint_name(name) and name not in committed:
                self._remove(folder / name)

    def subfolders(self, folder: CheckpointUrl) -> list[str]:
        return [name for name in self._folders(folder) if self._store.exists(self._path(folder / name / MANIFEST))]

    def exists(self, folder: CheckpointUrl) -> bool:
        return bool(self._store.exists(self._path(folder)))

    def open(self, file: CheckpointUrl) -> IO[bytes]:
        opened: IO[bytes] = self._store.open(self._path(file), "rb")
        return opened

    def size(self, file: CheckpointUrl) -> int:
        return int(self._store.info(self._path(file))["size"])

    def _folders(self, folder: CheckpointUrl) -> list[str]:
        path = self._path(folder)
        self._store.invalidate_cache(path)  # another process may have written since the last listing
        try:
            entries = self._store.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]

    def _remove(self, folder: CheckpointUrl) -> None:
        try:
            self._store.rm(self._path(folder), recursive=True)
        except OSError:  # without a manifest it is not a checkpoint; the next writer tries again
            pass

    def _path(self, url: CheckpointUrl) -> str:
        from fsspec.core import url_to_fs

        path: str = url_to_fs(url)[1]
        return path
