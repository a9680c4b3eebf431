"""`pulsetrain config`: the configuration that a run would have, with every default."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pulsetrain.cli.command import command
from pulsetrain.cli.pipe import until_closed
from pulsetrain.cli.reports import OK, logs_on_stderr
from pulsetrain.configuration.resolve import resolve

__all__ = ["add_parser"]

DESCRIPTION = """\
Print the configuration with every default filled in: the training settings, the
arguments of each class path, the handlers that are added. `pulsetrain train` takes
what is printed, and gives the same run. Comments mark what is a default and what came
from the command line; defaults that YAML cannot write are named, and stay as they are.
"""
EPILOG = """\
examples:
  pulsetrain config config.yaml --training.learning_rate 3e-4
  pulsetrain config config.yaml > full.yaml

exit status: 0 done; 2 wrong input
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "config",
        run,
        help="print a configuration with every default filled in",
        description=DESCRIPTION,
        epilog=EPILOG,
        usage="pulsetrain config CONFIG [--format yaml|json] [--SECTION.SETTING VALUE ...]",
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the configuration, YAML")
    parser.add_argument("--format", choices=("yaml", "json"), default="yaml", help="json has no comments")


def run(arguments: argparse.Namespace, settings: Mapping[str, str]) -> int:
    """Fill it in and print it."""
    with logs_on_stderr():
        resolved = resolve(arguments.config, settings)
    with until_closed():
        if arguments.format == "json":
            print(json.dumps(resolved.config, indent=2, ensure_ascii=False))
        else:
            print(resolved.as_yaml(), end="")
    return OK
