"""What `pulsetrain config` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

HELP = "print a configuration with every default filled in"
SYNOPSIS = "pulsetrain config CONFIG [--format yaml|json] [--SECTION.SETTING VALUE ...]"
DESCRIPTION = """\
Print the configuration with every default filled in: the training settings, the
arguments of each class path, and the standard handlers. `pulsetrain train` accepts the
output and trains the same run. Comments mark defaults and values from the command line.
A default that YAML cannot write, such as a lambda, is left out and named in a comment.
"""
EPILOG = """\
examples:
  pulsetrain config config.yaml --training.learning_rate 3e-4
  pulsetrain config config.yaml > full.yaml

exit status: 0 done; 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the configuration file, in YAML")
    parser.add_argument(
        "--format", choices=("yaml", "json"), default="yaml", help="output format; json has no comments"
    )
