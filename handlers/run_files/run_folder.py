"""Folders and files that handlers write in a run folder."""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path

from pulsetrain.engine.errors import RunFolderError

__all__ = ["make_folder", "replace_file"]


def make_folder(place: str, folder: Path) -> Path:
    """Create the folder if it is missing, and check that files can be written in it.

    Args:
        place: the handler's class name, for the message.
        folder: where the handler writes its files.

    Raises:
        RunFolderError: the folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        rule = f"cannot be written ({error.strerror or error}); choose another folder or change its permissions"
        raise RunFolderError(rule, place, folder=str(folder)) from error
    return folder


def replace_file(path: Path, content: bytes) -> None:
    """Write the file so that readers see the old content or the new, never a part.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_file(Path(folder) / "a", b"content")
    ...     (Path(folder) / "a").read_bytes()
    b'content'
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # several processes may write the file
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
