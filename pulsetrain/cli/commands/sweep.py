"""What `pulsetrain sweep` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

HELP = "train with many settings, and find the best"
DESCRIPTION = """\
Train the configuration that SWEEP.yaml names once for each trial, with settings drawn from
its search space, several at a time, each in a process of its own. Killed or interrupted, the
same command continues: trials that have ended stay, the others resume from their newest
checkpoints. At the end it prints a table, and writes best.yaml, which `pulsetrain train`
takes, and sweep.html into the sweep's folder.
"""
EPILOG = """\
examples:
  pulsetrain examples sweep_digits         (copies examples/sweep.yaml)
  pulsetrain sweep examples/sweep.yaml
  pulsetrain sweep examples/sweep.yaml --trials 32 --workers 4
  pulsetrain sweep sweeps/digits --status
  pulsetrain train sweeps/digits/best.yaml

exit status: 0 done; 1 every trial failed; 2 wrong input; 130 stopped
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("sweep", metavar="SWEEP.yaml", type=Path, help="the sweep; with --status also its folder")
    parser.add_argument("--folder", metavar="FOLDER", help="the sweep's folder, instead of the file's")
    parser.add_argument("--trials", metavar="N", type=int, help="the number of trials, instead of the file's")
    parser.add_argument("--workers", metavar="N", type=int, help="trials at a time, instead of the file's")
    parser.add_argument(
        "--worker", metavar="NAME", help="divide the trials among several processes, each with a name of its own"
    )
    parser.add_argument("--status", action="store_true", help="print the table of a sweep, also while it runs")
    parser.add_argument(
        "--train",
        action="store_true",
        help="train every trial, although `replay:` in the file names recorded runs that could answer",
    )
