"""The file operations that checkpoints need, wherever they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Protocol, cast

from pulsetrain.engine.checkpoint.digests import Write
from pulsetrain.engine.checkpoint.disk import Disk
from pulsetrain.engine.checkpoint.locations import CheckpointUrl, Location
from pulsetrain.engine.checkpoint.manifest import FileEntry
from pulsetrain.engine.checkpoint.remote import Remote

__all__ = ["Files", "files_of"]


class Files(Protocol):
    """Reads and writes checkpoints; each is a folder of files.

    Reading raises FileNotFoundError if the file is missing, and OSError if it cannot be read.
    """

    def make(self, folder: Location) -> None:
        """Create a folder for checkpoints if it is missing."""

    def begin(self, target: Location) -> None:
        """Begin a checkpoint, which readers see whole, once it is committed, or not at all."""

    def write(self, target: Location, name: str, content: Write) -> FileEntry:
        """Write a file of a checkpoint that was begun, here or in another process; it is durable when this returns.

        Args:
            target: folder of the checkpoint.
            name: of the file.
            content: writes it.

        Returns:
            Its size and digest.
        """

    def reopen(self, target: Location, name: str) -> IO[bytes]:
        """Open a file of a checkpoint that was begun and is not committed, for reading."""

    def commit(self, target: Location, manifest: bytes) -> None:
        """Complete a checkpoint that was begun; it is durable when this returns.

        Raises:
            OSError: it is not complete, or it is but may not be durable.
        """

    def abandon(self, target: Location) -> None:
        """Remove a checkpoint that was begun and not committed, as far as that is possible."""

    def replace(self, file: Location, content: bytes) -> None:
        """Write or replace a small file atomically; it is durable when this returns."""

    def delete(self, folders: Sequence[Location]) -> None:
        """Delete checkpoints; an interrupted deletion leaves nothing that looks like one."""

    def clean(self, folder: Location) -> None:
        """Remove what a crash left half-written or half-deleted."""

    def subfolders(self, folder: Location) -> list[str]:
        """Names of the folders that may be checkpoints; empty if `folder` is missing."""

    def exists(self, folder: Location) -> bool:
        """Whether the name is in use: a new checkpoint needs another one."""

    def open(self, file: Location) -> IO[bytes]:
        """Open a file for reading."""

    def size(self, file: Location) -> int:
        """Size of a file in bytes."""


def files_of(location: Location) -> Files:
    """The operations on a disk of this machine, or on the store of a URL."""
    # a cast: each of them accepts locations of its own kind only
    return cast(Files, Remote(location) if isinstance(location, CheckpointUrl) else Disk())
