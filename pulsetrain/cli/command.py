"""Declares a command of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Protocol

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["Subparsers", "command", "no_settings"]

Run = Callable[[argparse.Namespace, Mapping[str, str]], int]


class Subparsers(Protocol):
    """The subparsers that `ArgumentParser.add_subparsers` returns; argparse has no public name for their type."""

    def add_parser(
        self,
        name: str,
        *,
        help: str,
        usage: str | None,
        description: str,
        epilog: str,
        formatter_class: type[argparse.HelpFormatter],
        allow_abbrev: bool,
    ) -> argparse.ArgumentParser: ...


def command(
    commands: Subparsers, name: str, run: Run, *, help: str, description: str, epilog: str, usage: str | None = None
) -> argparse.ArgumentParser:
    """Add a command without arguments; the caller adds those.

    Args:
        commands: the subparsers of the program's parser.
        name: the command's name.
        run: runs the command with its arguments and the settings of the configuration; returns the exit status.
        help: the command's line in the list of commands.
        description: what the command does.
        epilog: examples and exit statuses.
        usage: the first line of the command's help; by default argparse's.
    """
    parser = commands.add_parser(
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
    """Reject settings of a configuration for a command that takes no configuration.

    Raises:
        ConfigurationError: there is a setting.
    """
    for name in settings:
        raise ConfigurationError(
            f"--{name}: {command} has no such option; train, config, lr-find and fork take settings of a configuration"
        )
