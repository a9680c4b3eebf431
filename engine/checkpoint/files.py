"""What is asked of a place where checkpoints lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol

from pulsetrain.engine.checkpoint.digesting import Write
from pulsetrain.engine.checkpoint.disk import Disk
from pulsetrain.engine.checkpoint.locations import CheckpointUrl, Place
from pulsetrain.engine.checkpoint.remote import Remote

__all__ = ["Files", "files_of"]


class Files(Protocol):
    """Reads and writes checkpoints; each is a folder of files.

    What is read raises FileNotFoundError where it is missing, and OSError where it cannot be read.
    """

    def make(self, folder: Any) -> None:
        """Make a folder of checkpoints where it is missing."""

    def commit(self, target: Any, name: str, state: Write, manifest: Callable[[dict[str, Any]], bytes]) -> None:
        """Write a checkpoint that a reader sees whole or not at all; when this returns it is durable.

        Args:
            name: of the state's file.
            state: writes it.
            manifest: the manifest, from the size and digest of the state's file.

        Raises:
            OSError: it could not be written, or is there and may not be durable.
        """

    def replace(self, file: Any, content: bytes) -> None:
        """Write a small file at once, over another one; when this returns it is durable."""

    def delete(self, folders: Sequence[Any]) -> None:
        """Delete checkpoints; one cut short leaves nothing that looks like one."""

    def clean(self, folder: Any) -> None:
        """Remove what a crash left half-written or half-deleted."""

    def subfolders(self, folder: Any) -> list[str]:
        """Names of the folders in a folder that may be checkpoints; none where it is missing."""

    def taken(self, folder: Any) -> bool:
        """Whether a new checkpoint cannot be called so."""

    def open(self, file: Any) -> IO[bytes]:
        """Open a file for reading."""

    def size(self, file: Any) -> int:
        """Bytes of a file."""


def files_of(place: Place) -> Files:
    """The files of a disk of this machine, or those behind a URL."""
    return Remote(place) if isinstance(place, CheckpointUrl) else Disk()
