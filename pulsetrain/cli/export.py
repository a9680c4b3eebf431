"""`pulsetrain export`: writes a recorded run for Perfetto, TensorBoard or a spreadsheet."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pulsetrain.cli.commands.export import ENDINGS
from pulsetrain.cli.reports import report_damage
from pulsetrain.engine.errors import ConfigurationError, RunFolderError
from pulsetrain.engine.recording import EventLog
from pulsetrain.export import write_csv, write_perfetto, write_tensorboard

__all__ = ["run"]

EVENT_FILE = "events.out.tfevents"  # how the names of TensorBoard's files begin


def run(arguments: argparse.Namespace) -> int:
    """Write the export, and print what was written, and damaged parts on standard error."""
    folder: Path = arguments.folder
    log = EventLog(folder, arguments.rank)
    if log.folder.name == "events":
        folder = log.folder.parent
    name = folder.resolve().name + (f".rank{log.rank}" if log.rank else "")
    into: Path = arguments.into if arguments.into is not None else Path(name + ENDINGS[arguments.format])
    _check(into, folder, arguments.format, arguments.force)
    try:
        with _partial(into) as partial:
            if arguments.format == "perfetto":
                written = f"{write_perfetto(log, partial, name):,} events; open it at https://ui.perfetto.dev"
            elif arguments.format == "csv":
                rows, columns = write_csv(log, partial)
                written = f"{rows:,} rows, {columns:,} columns"
            else:
                written = f"{write_tensorboard(log, partial):,} scalars; tensorboard --logdir {into}"
    except OSError as error:
        raise RunFolderError(
            f"--into {into}: cannot be written: {error.strerror or error}; choose another path"
        ) from error
    print(f"{into}: {written}")
    return report_damage(log.damage)


def _check(into: Path, folder: Path, form: str, force: bool) -> None:
    """Reject a path that would change the run, or overwrite files of another program."""
    run = folder.resolve()
    if into.resolve() == run or run in into.resolve().parents:
        raise ConfigurationError(
            f"--into {into}: is in the run folder {folder}, which is only read; choose another path"
        )
    if not into.exists() and not into.is_symlink():
        return
    if not force:
        raise ConfigurationError(f"--into {into}: already exists; choose another path, or overwrite it with --force")
    if form == "tensorboard":
        others = [path.name for path in into.iterdir() if not path.name.startswith(EVENT_FILE)] if into.is_dir() else ""
        if not into.is_dir() or others:
            what = f"also holds {others[0]}" if others else "is not a folder"
            raise ConfigurationError(
                f"--into {into}: {what}, and --force replaces only event files; choose another path"
            )
    elif not into.is_file():
        raise ConfigurationError(f"--into {into}: is not a file, and --force replaces only files; choose another path")


@contextmanager
def _partial(into: Path) -> Iterator[Path]:
    """A path beside the target that replaces it once everything is written, and is deleted where writing fails.

    It has the target's name: the ending says whether the file is compressed.
    """
    if not into.parent.is_dir():
        raise ConfigurationError(f"--into {into}: there is no folder {into.parent}; create it first")
    with tempfile.TemporaryDirectory(prefix=".export-", dir=into.parent) as beside:
        partial = Path(beside) / into.name
        yield partial
        if into.is_dir():
            shutil.rmtree(into)
        os.replace(partial, into)
