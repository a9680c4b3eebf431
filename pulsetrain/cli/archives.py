"""Archives of runs among the arguments of a command: they are unpacked, and what is printed names the archive."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO, cast

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["archives_as_folders", "named"]

_GIVEN: dict[str, str] = {}  # folder that an archive was unpacked into -> the archive, as it was given


def named(text: str) -> str:
    """The text with the archives in place of the folders that they were unpacked into."""
    for folder, given in _GIVEN.items():
        text = text.replace(folder, given)
    return text


@contextmanager
def archives_as_folders(arguments: argparse.Namespace) -> Iterator[None]:
    """Unpack the archives among the arguments, and name them in what is printed meanwhile.

    Raises:
        ConfigurationError: the command does not read archives.
        RunFolderError: a file is not an archive, or a damaged one.
    """
    _GIVEN.clear()
    for name, given in vars(arguments).items():
        if name in arguments.archives:
            setattr(arguments, name, _unpacked(given))
        elif arguments.module != "archive":
            _refuse(arguments.command, given)
    if not _GIVEN:
        yield
        return
    with (
        redirect_stdout(cast(TextIO, _Naming(sys.stdout))),
        redirect_stderr(cast(TextIO, _Naming(sys.stderr))),
    ):
        yield


def _unpacked(given: object) -> object:
    if isinstance(given, list):
        return [_unpacked(each) for each in given]
    if not isinstance(given, Path) or not given.is_file():
        return given
    from pulsetrain.runs.archive import unpacked

    folder = unpacked(given)
    _GIVEN[str(folder)] = str(given)
    return folder


def _refuse(command: str, given: object) -> None:
    for each in given if isinstance(given, list) else [given]:
        if isinstance(each, Path) and each.suffix == ".zip":
            from pulsetrain.runs.archive import is_archive

            if is_archive(each):
                rule = f"is an archive, and `pulsetrain {command}` needs a folder"
                remedy = f"unpack it: pulsetrain archive --unpack {each} --into FOLDER"
                raise ConfigurationError(f"{each}: {rule}; {remedy}")


class _Naming:
    """A stream that names archives."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(named(text))
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
