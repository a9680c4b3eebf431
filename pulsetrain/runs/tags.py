"""The tags of a run: words in a file of their own in its folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pulsetrain.engine.errors import ConfigurationError, RunFolderError
from pulsetrain.engine.file_lock import lock
from pulsetrain.engine.recording.log.files import read_file
from pulsetrain.handlers.run_files.run_folder import replace_file

__all__ = ["TAGS_FILE", "change_tags", "read_tags"]

TAGS_FILE = "tags.json"
_TAG = re.compile(r"[\w.:/@=-]{1,64}")


def read_tags(folder: Path) -> tuple[str, ...]:
    """The tags in alphabetical order; none if the file is missing or damaged."""
    try:
        return _read(folder / TAGS_FILE)
    except (OSError, ValueError):
        return ()


def _read(path: Path) -> tuple[str, ...]:
    return tuple(sorted(set(msgspec.json.decode(read_file(path), type=list[str]))))


def change_tags(folder: Path, added: Iterable[str] = (), removed: Iterable[str] = ()) -> tuple[str, ...]:
    """Add and remove tags; returns those that the run has then.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     change_tags(Path(folder), added=["good", "paper"]), change_tags(Path(folder), removed=["good"])
    (('good', 'paper'), ('paper',))

    Raises:
        ConfigurationError: a tag has a character that is not allowed.
        RunFolderError: the folder cannot be written, or its tags cannot be read.
    """
    added = list(added)
    for tag in added:
        if _TAG.fullmatch(tag) is None:
            rule = "needs 1 to 64 letters, digits or characters of _ . : / @ = -"
            raise ConfigurationError(rule, "pulsetrain tag", add=tag)
    path = folder / TAGS_FILE
    with _changing_alone(folder):
        try:
            before = _read(path)
        except FileNotFoundError:
            before = ()
        except (OSError, ValueError) as error:
            rule = "restore the file, or delete it, and with it the tags"
            raise RunFolderError(f"{path}: cannot be read: {error}; {rule}") from error
        tags = tuple(sorted({*before, *added} - set(removed)))
        if tags == before:
            return tags
        try:
            replace_file(path, msgspec.json.encode(list(tags)) + b"\n")
        except OSError as error:
            rule = "make room on its disk, or fix the permissions of the folder"
            raise RunFolderError(f"{path}: cannot be written: {error.strerror or error}; {rule}") from error
    return tags


@contextmanager
def _changing_alone(folder: Path) -> Iterator[None]:
    """While no other process changes the tags of the run: the folder is locked, which needs no further file."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        rule = "name a run folder that can be read"
        raise RunFolderError(f"{folder}: cannot be opened: {error.strerror or error}; {rule}") from error
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)
