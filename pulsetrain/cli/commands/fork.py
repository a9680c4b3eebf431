"""What `pulsetrain fork` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

HELP = "start a new run from a checkpoint of another"
SYNOPSIS = "pulsetrain fork RUN --at ITERATION --into FOLDER [--skip-batches FIRST[-LAST]] [--set KEY=VALUE]"
DESCRIPTION = """\
Make a new run from the last checkpoint that another run saved at or before an iteration,
with settings changed or batches left out. run.json of the new run names its parent;
`pulsetrain diff` and `pulsetrain report` compare the two from the checkpoint on.
"""
EPILOG = """\
A run that several processes have trained is forked by several, which then train the fork:
add --launch.nproc 2, or start this command with torchrun.

examples:
  pulsetrain fork runs/a --at 48000 --skip-batches 48211-48214 --into runs/b
  pulsetrain fork runs/a --at 48000 --set training.learning_rate=1e-4 --into runs/c --train

exit status: 0 done; 2 wrong input; with --train, the status of `pulsetrain train`
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument(
        "--at", metavar="ITERATION", type=int, required=True, help="the iteration at which the new run branches off"
    )
    parser.add_argument("--into", metavar="FOLDER", type=Path, required=True, help="the new run folder")
    parser.add_argument(
        "--skip-batches",
        metavar="FIRST[-LAST]",
        action="append",
        default=[],
        help="iterations of the old run whose batches the new run leaves out; repeatable",
    )
    parser.add_argument(
        "--set",
        dest="changes",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of the configuration, such as training.learning_rate=1e-4; repeatable",
    )
    parser.add_argument("--train", action="store_true", help="also train the new run")
