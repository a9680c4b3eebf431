"""What `pulsetrain where` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

ARCHIVES = ("folder",)
HELP = "show where each process of a run stands"
DESCRIPTION = """\
Show the last event of each process of a run, what the process did then, and which of
them the others wait for. It reads the event logs alone: the run may still train, hang,
or have been killed.
"""
EPILOG = """\
examples:
  pulsetrain where runs/a
  pulsetrain where runs/a --format json

exit status: 0 done; 2 the folder holds no log
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder or its archive")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="the format of the output")
