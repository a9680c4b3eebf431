"""The parser of the command line.

Each command has two modules. `commands.NAME` says what it accepts: HELP, its line in the list of commands; DESCRIPTION;
EPILOG, with examples and exit statuses; SYNOPSIS, where the usage line of argparse is too long; and add_arguments. It
imports nothing that takes time. `NAME` has `run`, which gets the arguments and, among them, the `settings` of a
configuration, and returns the exit status; it is imported when the command is run. ARCHIVES names the arguments
that may be archives of runs; `run` gets a NamedPath for each.
"""

from __future__ import annotations

import argparse
import platform
from importlib import import_module
from typing import Any

from pulsetrain.cli.archives import open_archives
from pulsetrain.cli.commands import (
    archive,
    bisect,
    checkpoint,
    completion,
    config,
    debug,
    diff,
    doctor,
    events,
    examples,
    export,
    fork,
    init,
    lr_find,
    memory,
    prune,
    replay,
    report,
    runs,
    serve,
    submit,
    sweep,
    tag,
    train,
    verify,
    watch,
    where,
)
from pulsetrain.engine.errors import did_you_mean
from pulsetrain.engine.optional import missing_package

__all__ = ["CommandParser", "make_parser", "run_command"]

COMMANDS = (
    train,
    config,
    lr_find,
    memory,
    runs,
    watch,
    serve,
    sweep,
    submit,
    replay,
    events,
    diff,
    bisect,
    where,
    verify,
    fork,
    debug,
    report,
    export,
    checkpoint,
    tag,
    archive,
    prune,
    init,
    examples,
    doctor,
    completion,
)


class CommandParser(argparse.ArgumentParser):
    """A parser that lists its arguments, for the completion script, and suggests the nearest name for a wrong one."""

    def __init__(self, **options: Any) -> None:
        self.declared: list[argparse.Action] = []
        self.commands: dict[str, CommandParser] = {}
        super().__init__(**options)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        self.declared.append(super().add_argument(*names, **options))
        return self.declared[-1]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        chosen, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.commands.get(getattr(chosen, "command", ""), self)
            known = [name for each in command.declared for name in each.option_strings]
            option = unknown[0].partition("=")[0]
            hint = "; it belongs after the command" if option in known else did_you_mean(option, known)
            setting = _setting(chosen.command, option)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{setting or hint}")
        return chosen

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(each) for each in action.choices]
            hint = did_you_mean(value, choices) or f" (choose from {', '.join(map(repr, choices))})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")


def _setting(command: str, option: str) -> str:
    """The setting that an option of another program is called here; "" if none is, or the command takes none."""
    from pulsetrain.cli.settings import CONFIGURED
    from pulsetrain.familiar_names import SETTINGS

    setting = SETTINGS.get(option.removeprefix("--").replace("-", "_")) if command in CONFIGURED else None
    return "" if setting is None else f"; give it as --training.{setting.partition('=')[0]}"


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; help lists the commands in this order."""
    parser = CommandParser(
        prog="pulsetrain",
        description="Train models from a configuration file, and work with recorded runs.",
        epilog="Begin with: pulsetrain init",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="show program's version number and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for each in COMMANDS:
        module = each.__name__.rpartition(".")[2]
        added = commands.add_parser(
            module.replace("_", "-"),
            help=each.HELP,
            usage=getattr(each, "SYNOPSIS", None),  # by default argparse's
            description=each.DESCRIPTION,
            epilog=each.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        each.add_arguments(added)
        added.set_defaults(module=module, archives=getattr(each, "ARCHIVES", ()))
    parser.commands = commands.choices
    commands.choices["completion"].set_defaults(program=parser, commands=commands.choices)
    return parser


def run_command(arguments: argparse.Namespace) -> int:
    """Run the chosen command; returns its exit status."""
    try:
        open_archives(arguments)
        status: int = import_module(f"pulsetrain.cli.{arguments.module}").run(arguments)
    except ModuleNotFoundError as error:
        missing = missing_package(f"pulsetrain {arguments.command}", error)
        if missing is None:
            raise
        raise missing from error
    return status


class _Version(argparse.Action):
    """Prints the versions, which are looked up only then: it takes longer than declaring all commands does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "nargs": 0, "default": argparse.SUPPRESS})

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        torch, python = _version_of("torch"), platform.python_version()
        print(f"pulsetrain {_version_of('pulsetrain')} (torch {torch}, Python {python})")
        parser.exit()


def _version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


class _Help(argparse.HelpFormatter):
    """Lists the commands in one column: argparse measures their width too late."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 16
