"""`pulsetrain fork`: makes a new run that starts from a checkpoint of another."""

from __future__ import annotations

import argparse
import re
import shlex

from pulsetrain.cli.reports import OK
from pulsetrain.cli.results import logs_on_stderr, run_folder
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.reproduce.fork import fork

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Make the run, and print what has changed and the command that trains it."""
    changes = dict(arguments.settings)
    for text in arguments.changes:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ConfigurationError(f"--set {text}: is not KEY=VALUE, such as training.learning_rate=1e-4")
        changes[name] = value
    folder = run_folder(arguments.folder)
    ranges = [parse_range(text) for text in arguments.skip_batches]
    with logs_on_stderr():
        made = fork(folder, arguments.at, arguments.into, changes, ranges)
    print(f"run folder  {arguments.into}")
    print(f"starts      after iteration {made.parent['iteration']:,} of {folder}")
    for index, change in enumerate(made.changed):
        print(f"{'changed' if not index else '':<12}{change}")
    words = ["train", str(arguments.into / "config.yaml"), "--run", str(arguments.into), "--resume", "latest"]
    if not arguments.train:
        print(f"train it: {shlex.join(['pulsetrain', *words])}")
        return OK
    from pulsetrain.cli import main

    return main(words)


def parse_range(text: str) -> tuple[int, int]:
    """A range of iterations, first and last included.

    Raises:
        ConfigurationError: the text is neither a range nor a number.

    >>> parse_range("48211-48214"), parse_range("7")
    ((48211, 48214), (7, 7))
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not 1 <= first <= last:
        raise ConfigurationError(
            f"--skip-batches {text}: needs an iteration, or a first and a last one, such as 48211-48214"
        )
    return first, last
