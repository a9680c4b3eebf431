"""What `pulsetrain examples` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

HELP = "list the examples, or copy one"
DESCRIPTION = """\
List the examples that come with Pulsetrain, with what each one shows; or copy one of
them, so that you can run and change it. One that needs others is copied with them
into a folder examples/, and runs from the folder above.
"""
EPILOG = """\
examples:
  pulsetrain examples
  pulsetrain examples minimal
  pulsetrain examples byte_lm --into work

exit status: 0 done; 2 wrong input, or the example is there already
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="an example, such as minimal")
    parser.add_argument("--into", metavar="FOLDER", type=Path, default=Path(), help="where to copy it [.]")
