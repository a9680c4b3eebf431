"""The place of a handler's files in a run folder."""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path

from pulsetrain.engine.errors import RunFolderError

__all__ = ["make_folder", "replace_file"]


def make_folder(place: str, folder: Path) -> Path:
    """Make the folder where it is missing, and try whether it can be written.

    Args:
        place: the handler's class name, for the message.
        folder: the folder that the handler writes its files in.

    Raises:
        RunFolderError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunFolderError(
            f"{place}(folder={str(folder)!r}): cannot be written ({error.strerror or error}); "
            "choose another folder or mend its permissions"
        ) from error
    return folder


def replace_file(path: Path, content: bytes) -> None:
    """Write the file so that readers see the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # several processes may write it
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
