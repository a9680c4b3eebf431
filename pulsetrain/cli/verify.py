"""`pulsetrain verify`: run a recorded run again, and see whether the same comes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pulsetrain.cli.command import command, no_settings
from pulsetrain.cli.pipe import until_closed
from pulsetrain.cli.reports import FAILED, OK, logs_on_stderr
from pulsetrain.configuration.rebuild import rebuild
from pulsetrain.trainer import Trainer
from pulsetrain.verification import verify

__all__ = ["add_parser"]

DAMAGED = 3
DESCRIPTION = """\
Train a stretch of a recorded run again, from the nearest checkpoint before it, and
compare every event with the recorded one as it comes, floats by their bits. It ends
at the first difference and says what it is, in which batch, and the likely cause.
The trainer is made from the run's config.yaml. The run's folder is only read.
"""
EPILOG = """\
examples:
  pulsetrain verify runs/a
  pulsetrain verify runs/a --from 48000 --to 48300

exit status: 0 the whole stretch came again to the bit; 1 it did not; 2 wrong input; 3 what could be read of the log did
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "verify",
        run,
        help="run a recorded run again and compare",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument(
        "--from",
        dest="first",
        metavar="ITERATION",
        type=int,
        help="the first that has to be compared; by default the run's beginning",
    )
    parser.add_argument(
        "--to", dest="last", metavar="ITERATION", type=int, help="the last; by default where the log ends"
    )


def run(arguments: argparse.Namespace, settings: Mapping[str, str]) -> int:
    """Run again, print what came of it, and say it by the exit status."""
    no_settings("verify", settings)

    def build(folder: Path) -> Trainer:
        return rebuild(arguments.folder, folder).trainer

    with logs_on_stderr():
        found = verify(arguments.folder, build, arguments.first, arguments.last)
    with until_closed():
        print(found.report())
    if found.divergence is None and found.missing is None:
        return DAMAGED if found.damage else OK
    return FAILED
