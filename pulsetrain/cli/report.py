"""`pulsetrain report`: writes a page about recorded runs, for a browser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from pulsetrain.cli.command import Subparsers, command, no_settings
from pulsetrain.cli.reports import OK
from pulsetrain.report import write_report

__all__ = ["add_parser"]

DAMAGED = 3
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


def add_parser(commands: Subparsers) -> None:
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
    parser.add_argument("--into", metavar="FILE", type=Path, default=Path("report.html"), help="the page [report.html]")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")


def run(arguments: argparse.Namespace, settings: Mapping[str, str]) -> int:
    """Write the page and print its path, and damaged parts on standard error."""
    no_settings("report", settings)
    written = write_report(arguments.runs, arguments.into, force=arguments.force)
    counts = [_count(len(arguments.runs), "run"), _count(written.curves, "curve")]
    print(f"{written.path}: {', '.join(counts)}, {written.bytes / 1e6:.1f} MB")
    for damage in written.damage:
        print(f"pulsetrain: damaged: {damage}", file=sys.stderr)
    return DAMAGED if written.damage else OK


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
