"""What `pulsetrain watch` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

ARCHIVES = ("runs",)
HELP = "show runs in the terminal while they train"
DESCRIPTION = """\
Show a run in the terminal while it trains: progress and time left, curves, the speed and
memory of each process and which of them the others wait for, checkpoints, anomalies, and
the newest events. Several runs are drawn in one picture. The runs are only read; a run
that has not begun yet is waited for.

keys: space pauses, c compares runs or shows one, n shows the next run, l changes the
scale, / filters the events, tab and the arrow keys scroll, q quits.

A condition is written as for `pulsetrain events --where`.
Needs textual, without --once: pip install 'pulsetrain[watch]'.
"""
EPILOG = """\
examples:
  pulsetrain watch runs/a
  pulsetrain watch runs/a runs/b --where 'event == "validation_completed"'
  pulsetrain watch runs/a --once

exit status: 0 done; 2 wrong input; 3 --once: a log is damaged, and its readable part was printed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder or its archive")
    parser.add_argument("--where", metavar="CONDITION", help="list only events for which this is true")
    parser.add_argument("--once", action="store_true", help="print the state of the runs as text, and exit")
