"""What `pulsetrain tag` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

HELP = "give runs tags, or take them away"
DESCRIPTION = """\
Add tags to runs, and remove tags from them. `pulsetrain runs` shows them and selects by
them, `serve` shows them, and `archive` keeps them. They are in the file tags.json of the
run folder; the run's other files do not change.
"""
EPILOG = """\
examples:
  pulsetrain tag runs/a runs/b --add paper --add lr=3e-4
  pulsetrain tag runs/a --remove paper

exit status: 0 done; 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder")
    parser.add_argument("--add", metavar="TAG", action="append", default=[], help="repeatable")
    parser.add_argument("--remove", metavar="TAG", action="append", default=[], help="repeatable")
