"""How every command of the command line is declared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["command", "no_settings"]

Run = Callable[[argparse.Namespace, Mapping[str, str]], int]


def command(
    commands: Any, name: str, run: Run, *, help: str, description: str, epilog: str, usage: str | None = None
) -> argparse.ArgumentParser:
    """Add a command; its arguments are the caller's to add.

    Args:
        commands: what `add_subparsers` gave.
        name: of the command.
        run: does it, given its arguments and the settings of the configuration among them; returns the exit status.
        help: a line for the list of commands.
        description: what it does.
        epilog: examples, and its exit statuses.
        usage: the first line of its help; by default argparse's.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def no_settings(command: str, settings: Mapping[str, str]) -> None:
    """Refuse settings of a configuration where there is none.

    Raises:
        ConfigurationError: there are some.
    """
    for name in settings:
        raise ConfigurationError(
            f"--{name}: {command} has no such option; those of a configuration are for train, config, lr-find and fork"
        )
