"""`pulsetrain completion`: prints a script with which a shell completes this command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

from pulsetrain.cli.reports import OK, until_closed
from pulsetrain.cli.settings import CONFIGURED
from pulsetrain.config import PRECISIONS, TrainingConfig
from pulsetrain.configuration.assemble import STRATEGIES
from pulsetrain.configuration.parse import NAMED, SECTIONS
from pulsetrain.engine.optimizers.registry import NAMES as OPTIMIZERS
from pulsetrain.engine.schedules.named import NAMES as SCHEDULES
from pulsetrain.handlers.loggers.optional import load_optional

__all__ = ["add_arguments"]

SHELLS = ("bash", "zsh", "fish")
FILES, FOLDERS = ("config",), ("folder", "runs", "a", "b", "into", "plot")  # arguments, by their names in the commands
CHOICES: dict[str, Iterable[str]] = {
    "training.optimizer": OPTIMIZERS,
    "training.schedule": SCHEDULES,
    "training.precision": PRECISIONS,
    "training.compile": ("true", "false"),
    "strategy": STRATEGIES,
}
HELP = "print a completion script for the shell"
DESCRIPTION = """\
Print a completion script for the shell. It completes commands, options, files, and the
settings of a configuration, such as --training.learning_rate, with their choices.
Needs shtab: pip install 'pulsetrain[completion]'.
"""
EPILOG = """\
examples:
  eval "$(pulsetrain completion bash)"                              in ~/.bashrc
  pulsetrain completion zsh > "${fpath[1]}/_pulsetrain"
  pulsetrain completion fish > ~/.config/fish/completions/pulsetrain.fish

exit status: 0 done; 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    shtab = load_optional("completion", "shtab", "completion")
    parser: argparse.ArgumentParser = arguments.program
    for name, each in arguments.commands.items():
        if name in CONFIGURED:
            for setting, choices in _settings():
                each.add_argument(f"--{setting}", metavar="VALUE", choices=choices)
        for action in each.declared:
            if action.dest in (*FILES, *FOLDERS) and action.choices is None:
                action.complete = shtab.FILE if action.dest in FILES else shtab.DIRECTORY
    script = shtab.complete(parser, arguments.shell)
    with until_closed():
        print(script)
    return OK


def _settings() -> Iterator[tuple[str, Sequence[str] | None]]:
    """The settings that every configuration has, with the values to choose from."""
    names = [f"training.{each.name}" for each in fields(TrainingConfig)]
    names += [section for section in SECTIONS if section not in ("run", "training")]
    names += [f"{section}.class_path" for section in NAMED]
    for name in names:
        choices = CHOICES.get(name.removesuffix(".class_path"))
        yield name, None if choices is None else sorted(choices)
