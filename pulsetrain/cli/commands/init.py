"""What `pulsetrain init` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

HELP = "write a small project to start from"
DESCRIPTION = """\
Write a folder with a configuration, a model, data and tests, which train as they are:
a small network that learns handwritten digits (with scikit-learn). Change them into
your own.
"""
EPILOG = """\
examples:
  pulsetrain init
  pulsetrain init digits && cd digits && pulsetrain train config.yaml

exit status: 0 done; 2 the folder exists already
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="NAME", nargs="?", type=Path, default=Path("project"), help="[project]")
