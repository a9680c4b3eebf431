"""`pulsetrain report`: one page about recorded runs, to look at in a browser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pulsetrain.cli.command import command, no_settings
from pulsetrain.cli.reports import OK
from pulsetrain.report import write_report

__all__ = ["add_parser"]

DAMAGED = 3
DESCRIPTION = """\
Write one HTML page about recorded runs, laid over each other: curves of every metric,
a timeline of what happened, where each run ended and why, and where their settings
and environments differ. The page needs no network, and the runs stay as they are.
Needs plotly: pip install 'pulsetrain[report]'.
"""
EPILOG = """\
examples:
  pulsetrain report runs/a
  pulsetrain report runs/a runs/b runs/c --into compared.html

exit status: 0 done; 2 wrong input; 3 a log is damaged, and the page shows what can be read of it
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "report",
        run,
        help="write a page with the curves, events and settings of runs",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder")
    parser.add_argument(
        "--into", metavar="FILE", type=Path, default=Path("report.html"), help="the page; by default report.html here"
    )
    parser.add_argument("--force", action="store_true", help="write over a file that is there")


def run(arguments: argparse.Namespace, settings: Mapping[str, str]) -> int:
    """Write the page and say where it is; what is damaged goes to standard error."""
    no_settings("report", settings)
    written = write_report(arguments.runs, arguments.into, force=arguments.force)
    counts = [_count(len(arguments.runs), "run"), _count(written.curves, "curve")]
    print(f"{written.path}: {', '.join(counts)}, {written.bytes / 1e6:.1f} MB")
    for damage in written.damage:
        print(f"pulsetrain: damaged: {damage}", file=sys.stderr)
    return DAMAGED if written.damage else OK


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
