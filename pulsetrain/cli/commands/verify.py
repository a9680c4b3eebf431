"""What `pulsetrain verify` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

ARCHIVES = ("folder",)
HELP = "train a recorded run again and compare"
SYNOPSIS = "pulsetrain verify RUN [--from ITERATION] [--to ITERATION] [--launch.nproc N]"
DESCRIPTION = """\
Train a part of a recorded run again, from the nearest checkpoint before it, and compare
every event with the recorded one, floats bit for bit. The command stops at the first
difference and reports it, with the batch and the likely cause. The trainer is built
from the run's config.yaml. The run's folder is only read.

A run that N processes have trained is repeated by as many, with --launch.nproc N or under
torchrun; each compares its own log, and the main one prints what was found. A run with
virtual ranks (parallel: {virtual: V, reduction: tree}) is repeated by any number that
divides V, with the number of threads that the run had.
"""
EPILOG = """\
examples:
  pulsetrain verify runs/a
  pulsetrain verify runs/a --from 48000 --to 48300
  pulsetrain verify runs/b --launch.nproc 2

exit status: 0 reproduced bit for bit; 1 not reproduced, or one of several processes failed; 2 wrong input; 3 a log is
damaged or missing, or some iterations could not be compared, the rest reproduced
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder or its archive")
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
