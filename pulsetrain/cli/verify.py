"""`pulsetrain verify`: trains a recorded run again and compares the two."""

from __future__ import annotations

import argparse
from pathlib import Path

from pulsetrain.cli.reports import DAMAGED, FAILED, OK, logs_on_stderr, run_folder, until_closed
from pulsetrain.configuration.rebuild import rebuild
from pulsetrain.verification import verify

__all__ = ["add_arguments"]

HELP = "train a recorded run again and compare"
DESCRIPTION = """\
Train a part of a recorded run again, from the nearest checkpoint before it, and compare
every event with the recorded one, floats bit for bit. The command stops at the first
difference and reports it, with the batch and the likely cause. The trainer is built
from the run's config.yaml. The run's folder is only read.
"""
EPILOG = """\
examples:
  pulsetrain verify runs/a
  pulsetrain verify runs/a --from 48000 --to 48300

exit status: 0 reproduced bit for bit; 1 not reproduced; 2 wrong input; 3 the log is damaged, the rest reproduced
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="RUN", type=run_folder, help="a run folder")
    parser.add_argument(
        "--from",
        dest="first",
        metavar="ITERATION",
        type=int,
        help="the first iteration to compare; by default the run's first",
    )
    parser.add_argument(
        "--to",
        dest="last",
        metavar="ITERATION",
        type=int,
        help="the last iteration to compare; by default the last in the log",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train again, print the result, and return it as the exit status."""
    run: Path = arguments.folder
    with logs_on_stderr():
        found = verify(run, lambda folder: rebuild(run, folder).trainer, arguments.first, arguments.last)
    with until_closed():
        print(found.report())
    if found.divergence is None and found.missing is None and found.tensor is None:
        return DAMAGED if found.damage else OK
    return FAILED
