"""Folders and files that handlers write in a run folder."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pulsetrain.engine.errors import ConfigurationError, PulsetrainError, RunFolderError

__all__ = ["local_folder", "make_folder", "replace_file", "writing"]


def local_folder(place: str, folder: str | os.PathLike[str]) -> Path:
    """The folder as a path; "file://..." included.

    Args:
        place: the handler's class name, for the message.
        folder: as the user gave it.

    Raises:
        ConfigurationError: it is a URL of another machine.

    >>> local_folder("Plots", "runs/a").as_posix()
    'runs/a'
    """
    from pulsetrain.engine.checkpoint import location_of  # imports torch, which the process that draws does without

    text = os.fspath(folder)
    if "://" in text and not text.startswith("file://"):
        rule = "is a URL, and these files are written on this machine alone; give a path. Checkpoints may be at a URL"
        raise ConfigurationError(rule, place, folder=text)
    return Path(location_of(text))


def make_folder(place: str, folder: Path) -> Path:
    """Create the folder if it is missing, and check that files can be written in it.

    Args:
        place: the handler's class name, for the message.
        folder: where the handler writes its files.

    Raises:
        RunFolderError: the folder cannot be created or written.
    """
    import tempfile  # here, as commands that only read do without it

    with writing(place, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    return folder


@contextmanager
def writing(place: str, folder: Path, file: str = "") -> Iterator[None]:
    """A block that writes in the folder: what the operating system refuses is reported with the folder and a remedy.

    Args:
        place: the handler's class name, for the message.
        folder: where the handler writes its files.
        file: the name of the one that is written, if it is one.

    Raises:
        RunFolderError: the disk is full, or the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, PulsetrainError):
            raise
        what = f"{file} cannot be written" if file else "cannot be written"
        remedy = "choose another folder, make room on its disk, or fix its permissions"
        rule = f"{what} ({error.strerror or error}); {remedy}"
        raise RunFolderError(rule, place, folder=str(folder)) from error


def replace_file(path: Path, content: bytes) -> None:
    """Write the file so that readers see the old content or the new, never a part.

    >>> import tempfile
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
