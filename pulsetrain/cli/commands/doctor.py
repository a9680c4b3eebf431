"""What `pulsetrain doctor` accepts, and its help."""

from __future__ import annotations

import argparse

__all__ = ["add_arguments"]

HELP = "show what is installed, and test that it works here"
DESCRIPTION = """\
Show versions, devices and optional packages with what they are for, and test this
installation within a minute: a small run trains, is recorded, is interrupted and
resumed exactly, and is replayed. Please include the output in reports of faults.
"""
EPILOG = """\
examples:
  pulsetrain doctor
  pulsetrain doctor --no-test

exit status: 0 all tests passed; 1 one failed; 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("--no-test", action="store_true", help="only show what is installed")
