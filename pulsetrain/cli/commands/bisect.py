"""What `pulsetrain bisect` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

HELP = "find the setting or the commit that makes a run worse"
DESCRIPTION = """\
Find which of the settings that differ between two runs makes a metric worse: short runs
with some settings of BAD and the others of GOOD, forked from the last checkpoint up to
which both agree, or from the beginning. The answer is the smallest set of settings that
is enough, with the runs that prove it. With --git, the first bad commit between them.

Killed or interrupted, the same command continues: runs that have ended stay.
"""
EPILOG = """\
examples:
  pulsetrain bisect runs/a runs/b
  pulsetrain bisect runs/a runs/b --metric val/accuracy --iterations 500
  pulsetrain bisect runs/monday runs/today --git

exit status: 0 found; 1 no single run explains it, since some fail; 2 wrong input, or BAD
is not worse than GOOD in the short runs; 130 stopped
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("good", metavar="GOOD", type=Path, help="a run folder")
    parser.add_argument("bad", metavar="BAD", type=Path, help="the run folder of a worse run")
    parser.add_argument("--metric", metavar="NAME", help="what is worse [the first that validations report]")
    parser.add_argument(
        "--mode", choices=("min", "max"), help="which values of --metric are better, where its name does not say it"
    )
    parser.add_argument("--iterations", metavar="N", type=int, help="of each short run [as long as GOOD and BAD]")
    parser.add_argument("--noise", type=float, default=0.0, help="differences of the metric that do not count [0]")
    parser.add_argument("--into", metavar="FOLDER", type=Path, help="where the short runs are kept [BAD-bisect]")
    parser.add_argument("--git", action="store_true", help="compare the commits, not the settings")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="the format of the output")
