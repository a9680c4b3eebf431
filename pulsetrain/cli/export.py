"""`pulsetrain export`: writes a recorded run for Perfetto, TensorBoard or a spreadsheet, or its model."""

from __future__ import annotations

import argparse
from pathlib import Path

from pulsetrain.cli.commands.export import ENDINGS, OF_MODELS
from pulsetrain.cli.reports import report_damage
from pulsetrain.cli.targets import check_target, replacing
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording import EventLog
from pulsetrain.export import write_csv, write_perfetto, write_tensorboard

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Write the export, and print what was written, and damaged parts on standard error."""
    if arguments.format in OF_MODELS:
        from pulsetrain.cli import export_model  # imports torch, which exporting a log does not need

        return export_model.run(arguments)
    log = EventLog(arguments.folder, arguments.rank)
    folder = log.run_folder
    name = folder.resolve().name + (f".rank{log.rank}" if log.rank else "")
    into: Path = arguments.into if arguments.into is not None else Path(name + ENDINGS[arguments.format])
    check_target(into, folder, arguments.format, arguments.force)
    try:
        with replacing(into) as partial:
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
    print(plain(f"{into}: {written}"))
    return report_damage(log.damage)
