"""`pulsetrain archive`: writes runs as single files, and makes run folders of them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pulsetrain.cli.reports import OK
from pulsetrain.engine.errors import ConfigurationError, RunFolderError
from pulsetrain.engine.plain_text import format_count, plain
from pulsetrain.runs.archive import is_archive, unpacked, write_archive
from pulsetrain.runs.summary import ARCHIVE_SUFFIX, check_run

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Write each archive, or unpack it, and print its path; returns the exit status."""
    into: Path = arguments.into
    if os.path.lexists(into) and not into.is_dir():
        raise ConfigurationError(f"--into {into}: is not a folder; choose another path")
    if not arguments.unpack:
        _check_all(arguments)
    for each in arguments.runs:
        print(plain(_unpack(each, into) if arguments.unpack else _archive(each, arguments)))
    return OK


def _check_all(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be archived, before the first archive is written."""
    targets: list[Path] = []
    for run_folder in arguments.runs:
        check_run(run_folder)
        target = _target(run_folder, arguments.into)
        if target in targets:  # --force would overwrite the first
            raise ConfigurationError(f"{target}: two of the runs have this name; archive them into different folders")
        if run_folder.resolve() in target.resolve().parents:
            raise ConfigurationError(
                f"--into {arguments.into}: is in the run folder, which is only read; choose another"
            )
        if os.path.lexists(target) and not arguments.force:
            raise ConfigurationError(f"{target}: already exists; choose another folder with --into, or use --force")
        targets.append(target)


def _target(run_folder: Path, into: Path) -> Path:
    return into / f"{run_folder.resolve().name}{ARCHIVE_SUFFIX}"


def _archive(run_folder: Path, arguments: argparse.Namespace) -> str:
    made = write_archive(run_folder, _target(run_folder, arguments.into), checkpoints=arguments.checkpoints)
    if made.newer:
        print(f"pulsetrain: {plain(str(run_folder))}: {made.newer}", file=sys.stderr)
    for each in made.left_out:
        print(f"pulsetrain: left out {plain(each)}", file=sys.stderr)
    for each in made.redacted:
        print(f"pulsetrain: {plain(each)}: credentials were replaced in the archive", file=sys.stderr)
    return f"{made.path}: {format_count(made.files, 'file')}, {made.size / 1e6:,.1f} MB"


def _unpack(archive: Path, into: Path) -> str:
    if not os.path.lexists(archive):
        raise RunFolderError(f"{archive}: does not exist; name an archive, which `pulsetrain archive RUN` makes")
    if not is_archive(archive):
        raise RunFolderError(f"{archive}: is not a run's archive; `pulsetrain archive RUN` makes one")
    folder = unpacked(archive, into)
    target = into / folder.name
    if os.path.lexists(target):
        raise ConfigurationError(f"{target}: already exists; choose another folder with --into")
    folder.rename(target)
    return str(target)
