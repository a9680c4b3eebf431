"""`pulsetrain config`: prints the configuration that a run would use, with every default."""

from __future__ import annotations

import argparse
import json

from pulsetrain.cli.reports import OK, until_closed
from pulsetrain.cli.results import logs_on_stderr
from pulsetrain.configuration.resolve import resolve

__all__ = ["run"]


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
