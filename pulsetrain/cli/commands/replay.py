"""What `pulsetrain replay` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

from pulsetrain.cli.commands.rank_option import add_rank

__all__ = ["add_arguments"]

ARCHIVES = ("runs",)
HELP = "show what a handler with other settings would have done"
SYNOPSIS = "pulsetrain replay RUN [RUN ...] --handler NAME[:ARGUMENT=VALUE,...] [--handler ...] [OPTION ...]"
DESCRIPTION = """\
Replay recorded runs through handlers, one at a time, and show what each would have done:
where it would have stopped the run, the best value that it would have kept, and how
many iterations that saves. Nothing is trained, and the runs' folders are only read.

A handler is given by its name, with its arguments after a colon:
  --handler early_stopping:patience=3,metric=val/loss
"""
EPILOG = """\
examples:
  pulsetrain replay runs/a --handler early_stopping:patience=3
  pulsetrain replay runs/* --handler early_stopping:patience=3 --handler early_stopping:patience=10

exit status: 0 done; 2 wrong input, such as a metric that a run lacks: its row says so, and the other rows are
printed; 3 a log is damaged, and its readable part was replayed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder or its archive")
    parser.add_argument(
        "--handler",
        dest="handlers",
        metavar="NAME[:ARGUMENT=VALUE,...]",
        action="append",
        required=True,
        help="a handler, such as early_stopping, or the class path of your own",
    )
    parser.add_argument("--engine", metavar="NAME", help="the engine to attach to; by default the trainer")
    add_rank(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="the format of the output")
