"""What `pulsetrain runs` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

HELP = "list the runs in a folder"
DESCRIPTION = """\
List the runs below a folder: how far each is or how it ended, its best metrics, the
settings in which the runs differ, tags, and the run that it was forked from.

A run is running, completed, stopped (before its bound), failed (by an exception),
killed (its process no longer exists), or stalled (no event for much longer than
between its other ones).

A condition consists of name, status, reason, epoch, iteration, progress, last, best,
tags, parent ..., of settings by their dotted names, constants, comparisons, and, or,
not, arithmetic, [...], in, abs(), len() and isnan().
"""
EPILOG = """\
examples:
  pulsetrain runs
  pulsetrain runs runs --sort val/loss --limit 10
  pulsetrain runs runs --where 'best["val/loss"] < 2 and training.learning_rate > 1e-3'
  pulsetrain runs runs --status running,stalled --columns run,progress,train/loss --format csv

exit status: 0 done; 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help="where the runs are [runs, or .]")
    parser.add_argument("--where", metavar="CONDITION", help="only runs for which this is true")
    parser.add_argument("--status", type=_words, default=(), help="only runs with one of these, such as running,failed")
    parser.add_argument("--tag", action="append", default=[], help="only runs with this tag; repeatable")
    parser.add_argument("--sort", metavar="COLUMN", default="run", help="the order: a metric, a setting, updated [run]")
    parser.add_argument("--reverse", action="store_true", help="the largest values first")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N")
    parser.add_argument("--columns", type=_words, metavar="NAMES", help="such as run,status,val/loss,training.seed")
    parser.add_argument("--format", choices=("table", "json", "csv"), default="table", help="json: an object per line")
    parser.add_argument("--no-index", action="store_true", help="read every run again, and remember nothing")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
