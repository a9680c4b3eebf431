"""The parser of every command."""

from __future__ import annotations

import argparse

from pulsetrain.cli import completion, config, debug, diff, events, export, fork, lr_find, replay, report, train, verify
from pulsetrain.cli.reports import versions

__all__ = ["make_parser"]

COMMANDS = (train, config, lr_find, replay, events, diff, verify, fork, debug, report, export, completion)


def make_parser() -> argparse.ArgumentParser:
    """With the commands in the order in which help lists them."""
    parser = argparse.ArgumentParser(
        prog="pulsetrain",
        description="Train models from a configuration file, and record what happens.",
        epilog="Begin with: pulsetrain train examples/byte_lm/config.yaml",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=versions())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for each in COMMANDS:
        each.add_parser(commands)
    commands.choices["completion"].set_defaults(program=parser)
    return parser


class _Help(argparse.HelpFormatter):
    """Lists commands in one column: argparse knows of their width too late."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 16
