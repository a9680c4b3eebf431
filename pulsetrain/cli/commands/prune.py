"""What `pulsetrain prune` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

HELP = "delete old checkpoints of runs that have ended"
DESCRIPTION = """\
Delete checkpoints of the runs below a folder: all but the newest ones and the best one
of each run. Without --yes it only shows what would be deleted. Runs that are running
or stalled are left out. Checkpoints that a fork was made from are kept.
"""
EPILOG = """\
examples:
  pulsetrain prune runs
  pulsetrain prune runs --keep-last 2 --older-than 30 --yes
  pulsetrain prune runs --where 'best["val/loss"] > 2' --yes

exit status: 0 done; 1 something could not be deleted; 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where the runs are; or a run")
    parser.add_argument("--keep-last", type=int, metavar="N", default=1, help="the newest N of each run are kept [1]")
    parser.add_argument("--where", metavar="CONDITION", help="only of runs for which this is true, as in `runs`")
    parser.add_argument("--older-than", type=float, metavar="DAYS", help="only of runs without an event for so long")
    parser.add_argument("--yes", action="store_true", help="delete them")
