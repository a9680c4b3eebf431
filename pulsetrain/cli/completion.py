"""`pulsetrain completion`: prints a script with which a shell completes this command line."""

from __future__ import annotations

import argparse

from pulsetrain.cli.completed_settings import SETTINGS
from pulsetrain.cli.reports import OK, until_closed
from pulsetrain.cli.settings import CONFIGURED
from pulsetrain.engine.optional import load_optional

__all__ = ["run"]

FILES, FOLDERS = ("config",), ("folder", "runs", "a", "b", "into", "plot")  # arguments, by their names in the commands


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    shtab = load_optional("completion", "shtab", "completion")
    parser: argparse.ArgumentParser = arguments.program
    for name, each in arguments.commands.items():
        if name in CONFIGURED:
            for setting, choices in SETTINGS.items():
                each.add_argument(f"--{setting}", metavar="VALUE", choices=choices)
        for action in each.declared:
            if action.dest in (*FILES, *FOLDERS) and action.choices is None:
                action.complete = shtab.FILE if action.dest in FILES else shtab.DIRECTORY
    script = shtab.complete(parser, arguments.shell)
    with until_closed():
        print(script)
    return OK
