"""The parser of the command line, with every command."""

from __future__ import annotations

import argparse

from pulsetrain.cli import completion, config, debug, diff, events, export, fork, lr_find, replay, report, train, verify
from pulsetrain.cli.reports import versions

__all__ = ["make_parser"]

COMMANDS = (train, config, lr_find, replay, events, diff, verify, fork, debug, report, export, completion)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; help lists the commands in this order."""
    parser = argparse.ArgumentParser(
        prog="pulsetrain",
        description="Train models from a configuration file, and work with recorded runs.",
        epilog="Begin with: pulsetrain train examples/byte_lm/config.yaml",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=versions())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for each in COMMANDS:
        each.add_parser(commands)
    commands.choices["completion"].set_defaults(program=parser, commands=commands.choices)
    return parser


class _Help(argparse.HelpFormatter):
    """Lists the commands in one column: argparse measures their width too late."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 16
