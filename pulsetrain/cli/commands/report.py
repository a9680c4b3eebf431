"""What `pulsetrain report` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

ARCHIVES = ("runs",)
HELP = "write a page with the curves, events and settings of runs"
DESCRIPTION = """\
Write one HTML page that overlays recorded runs: curves of every metric, a timeline of
events, where and why each run ended, and where their settings and environments differ.
The page needs no network. The runs' folders are only read.
Needs plotly: pip install 'pulsetrain[report]'.
"""
EPILOG = """\
examples:
  pulsetrain report runs/a
  pulsetrain report runs/a runs/b runs/c --into compared.html

exit status: 0 done; 2 wrong input; 3 a log is damaged, and the page shows its readable part
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder or its archive")
    parser.add_argument("--into", metavar="FILE", type=Path, default=Path("report.html"), help="the page [report.html]")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
