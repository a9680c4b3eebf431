"""`pulsetrain config`: prints the configuration that a run would use, with every default."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pulsetrain.cli.reports import OK, logs_on_stderr, until_closed
from pulsetrain.configuration.resolve import resolve

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


def run(arguments: argparse.Namespace) -> int:
    """Fill in the defaults and print the configuration."""
    with logs_on_stderr():
        resolved = resolve(arguments.config, arguments.settings)
    with until_closed():
        if arguments.format == "json":
            print(json.dumps(resolved.config, indent=2, ensure_ascii=False))
        else:
            print(resolved.as_yaml(), end="")
    return OK
