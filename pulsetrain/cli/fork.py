"""`pulsetrain fork`: makes a new run that starts from a checkpoint of another."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from pulsetrain.cli.reports import OK, logs_on_stderr, run_folder
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.reproduce.fork import fork

__all__ = ["add_arguments"]

HELP = "start a new run from a checkpoint of another"
SYNOPSIS = "pulsetrain fork RUN --at ITERATION --into FOLDER [--skip-batches FIRST[-LAST]] [--set KEY=VALUE]"
DESCRIPTION = """\
Make a new run from the last checkpoint that another run saved at or before an iteration,
with settings changed or batches left out. run.json of the new run names its parent;
`pulsetrain diff` and `pulsetrain report` compare the two from the checkpoint on.
"""
EPILOG = """\
examples:
  pulsetrain fork runs/a --at 48000 --skip-batches 48211-48214 --into runs/b
  pulsetrain fork runs/a --at 48000 --set training.learning_rate=1e-4 --into runs/c --train

exit status: 0 done; 2 wrong input; with --train, the status of `pulsetrain train`
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="RUN", type=run_folder, help="a run folder")
    parser.add_argument(
        "--at", metavar="ITERATION", type=int, required=True, help="the iteration at which the new run branches off"
    )
    parser.add_argument("--into", metavar="FOLDER", type=Path, required=True, help="the new run folder")
    parser.add_argument(
        "--skip-batches",
        metavar="FIRST[-LAST]",
        action="append",
        default=[],
        help="iterations of the old run whose batches the new run leaves out; repeatable",
    )
    parser.add_argument(
        "--set",
        dest="changes",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of the configuration, such as training.learning_rate=1e-4; repeatable",
    )
    parser.add_argument("--train", action="store_true", help="also train the new run")


def run(arguments: argparse.Namespace) -> int:
    """Make the run, and print what has changed and the command that trains it."""
    changes = dict(arguments.settings)
    for text in arguments.changes:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ConfigurationError(f"--set {text}: is not KEY=VALUE, such as training.learning_rate=1e-4")
        changes[name] = value
    ranges = [parse_range(text) for text in arguments.skip_batches]
    with logs_on_stderr():
        made = fork(arguments.folder, arguments.at, arguments.into, changes, ranges)
    print(f"run folder  {arguments.into}")
    print(f"starts      after iteration {made.parent['iteration']:,} of {arguments.folder}")
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
