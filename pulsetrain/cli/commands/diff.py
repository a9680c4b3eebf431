"""What `pulsetrain diff` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

from pulsetrain.cli.commands.rank_option import add_rank

__all__ = ["add_arguments"]

ARCHIVES = ("a", "b")
HELP = "compare two runs event by event"
DESCRIPTION = """\
Compare the event logs of two runs, bit for bit, in everything that a repeated run must
reproduce. Times and throughput are not compared, nor are events that a resumed run
has computed again.
"""
EPILOG = """\
examples:
  pulsetrain diff runs/a runs/b
  pulsetrain diff runs/cpu runs/gpu --rtol 1e-5
  pulsetrain diff runs/a --ranks

exit status: 0 the logs agree; 1 they differ; 2 they cannot be compared; 3 a log is damaged, the readable parts agree
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("a", metavar="A", type=Path, help="a run folder or its archive")
    parser.add_argument("b", metavar="B", type=Path, nargs="?", help="another one")
    parser.add_argument(
        "--ranks", action="store_true", help="compare the processes of one run with each other, in what they share"
    )
    add_rank(parser)
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance for floats [0]")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance for floats [0]")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="the format of the output")
    parser.add_argument("--first", action="store_true", help="report only the first difference, and stop reading there")
