"""Archives of runs among the arguments of a command: they are unpacked, and messages call them by their own names."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["open_archives"]


def open_archives(arguments: argparse.Namespace) -> None:
    """Unpack the archives among the arguments, each into a folder that `str` calls by the archive's path.

    Raises:
        ConfigurationError: the command does not read archives.
        RunFolderError: a file is not an archive, or a damaged one.
    """
    for name, given in vars(arguments).items():
        if name in arguments.archives:
            setattr(arguments, name, _opened(given))
        elif arguments.module != "archive":
            _refuse(arguments.command, given)


def _opened(given: object) -> object:
    if isinstance(given, list):
        return [_opened(each) for each in given]
    if not isinstance(given, Path) or not given.is_file():
        return given
    from pulsetrain.engine.recording.log.files import NamedPath
    from pulsetrain.runs.archive import unpacked

    folder = unpacked(given)
    return given if folder == given else NamedPath(folder, str(given))


def _refuse(command: str, given: object) -> None:
    for each in given if isinstance(given, list) else [given]:
        if isinstance(each, Path) and each.suffix == ".zip":
            from pulsetrain.runs.archive import is_archive

            if is_archive(each):
                rule = f"is an archive, and `pulsetrain {command}` needs a folder"
                remedy = f"unpack it: pulsetrain archive --unpack {shlex.quote(str(each))} --into FOLDER"
                raise ConfigurationError(f"{each}: {rule}; {remedy}")
