"""`pulsetrain watch`: shows runs in the terminal while they train, or prints their state."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from pulsetrain.cli.reports import DAMAGED, OK, until_closed
from pulsetrain.engine.errors import ConfigurationError, RecordingError, RunFolderError
from pulsetrain.engine.optional import load_optional
from pulsetrain.engine.recording.log.predicate import predicate
from pulsetrain.watch.sections import as_text
from pulsetrain.watch.watched import Watched, watch_runs

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Show the runs until the user quits, or print them; returns the exit status."""
    where = None if arguments.where is None else predicate(arguments.where)
    runs = watch_runs(arguments.runs, where)
    if arguments.once:
        return _print(runs)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError("pulsetrain watch: standard input or output is not a terminal; add --once for text")
    load_optional("pulsetrain watch", "textual", "watch")
    from pulsetrain.watch.app import WatchApp

    WatchApp(runs, arguments.where or "").run()
    return OK


def _print(runs: Sequence[Watched]) -> int:
    for each in runs:
        if not os.path.exists(each.run.folder):
            raise RunFolderError(f"{each.run.label}: does not exist; name a run folder")
        each.update()
        if each.error:
            raise RecordingError(each.error)
    columns = shutil.get_terminal_size((0, 0)).columns
    with until_closed():
        for number, each in enumerate(runs):
            print("\n".join(["", *as_text(each, columns)] if number else as_text(each, columns)))
    return DAMAGED if any(each.run.damage for each in runs) else OK
