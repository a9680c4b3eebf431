"""`pulsetrain lr-find`: a learning-rate range test of what a configuration describes."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pulsetrain.cli.command import command
from pulsetrain.cli.pipe import until_closed
from pulsetrain.cli.reports import FAILED, OK, logs_on_stderr, program
from pulsetrain.configuration.assemble import assemble
from pulsetrain.configuration.messages import in_settings
from pulsetrain.configuration.parse import read_config
from pulsetrain.configuration.rebuild import base_of
from pulsetrain.engine.errors import PulsetrainError
from pulsetrain.engine.schedules import group_ratios
from pulsetrain.handlers import LRFinder
from pulsetrain.handlers.learning_rate.lr_finder import LRFinderResult
from pulsetrain.trainer import Trainer

__all__ = ["add_parser"]

ROWS = 12  # of the table
# what a run would write, or wait for
_WITHOUT = ("run_dir", "save_every_n_epochs", "early_stopping_patience")
DESCRIPTION = """\
Train a few updates at ever larger learning rates, from the weights that a run of this
configuration would begin with, and suggest the rate at which the loss falls fastest,
single batches apart. Nothing is left behind but the plot, where one is asked for;
handlers and validation sets take no part.

Any setting can be given here as well: --training.optimizer sgd
"""
EPILOG = """\
examples:
  pulsetrain lr-find config.yaml
  pulsetrain lr-find config.yaml --start 1e-5 --end 1 --iterations 200 --plot found --training.optimizer sgd

exit status: 0 a rate is suggested; 1 there is none, and it says why; 2 wrong input
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "lr-find",
        run,
        help="find a learning rate for a configuration",
        usage="pulsetrain lr-find CONFIG [--start RATE] [--end RATE] [--iterations N] [--plot FOLDER] "
        "[--SECTION.SETTING VALUE ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the configuration, YAML")
    parser.add_argument("--start", metavar="RATE", type=float, default=1e-7, help="the first rate [1e-7]")
    parser.add_argument("--end", metavar="RATE", type=float, default=10.0, help="the last rate [10]")
    parser.add_argument("--iterations", metavar="N", type=int, default=100, help="updates [100]")
    parser.add_argument("--plot", metavar="FOLDER", type=Path, help="write FOLDER/plots/lr_finder.png and .svg")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")


def run(arguments: argparse.Namespace, settings: Mapping[str, str]) -> int:
    """Sweep, print what came of it and the command that uses it."""
    finder = LRFinder(arguments.start, arguments.end, arguments.iterations, folder=arguments.plot)
    with logs_on_stderr(), tempfile.TemporaryDirectory(prefix="lr-find-") as place:
        try:
            config = read_config(arguments.config, settings)
            training = {name: value for name, value in (config.get("training") or {}).items() if name not in _WITHOUT}
            config |= {"handlers": [], "training": training}
            trainer = assemble(config, base_of(arguments.config.parent), Path(place) / "run").trainer
            print(f"training {arguments.iterations} updates at rates that grow ...", file=sys.stderr)
            found = finder.run(trainer)
        except Exception as error:
            if arguments.traceback:
                traceback.print_exc()
            if isinstance(error, PulsetrainError):
                raise in_settings(error) from error
            error.add_note("--traceback shows where in the code")
            raise
    with until_closed():
        print(_report(found, trainer, arguments, settings))
    return FAILED if found.suggestion is None else OK


def _report(found: LRFinderResult, trainer: Trainer, arguments: argparse.Namespace, settings: Mapping[str, str]) -> str:
    lines = ["", f"{'learning rate':>13}{'loss':>12}{'mean':>12}"]
    rows = range(len(found.rates))
    shown = {round(number * (len(rows) - 1) / (ROWS - 1)) for number in range(ROWS)}
    for row in rows:
        suggested = found.rates[row] == found.suggestion
        if row in shown or suggested:
            mark = "  <- falls fastest" if suggested else ""
            lines.append(f"{found.rates[row]:>13.2e}{found.losses[row]:>12.4g}{found.smoothed[row]:>12.4g}{mark}")
    if found.diverged:
        lines.append(f"the loss ran away after {len(found.rates)} of {arguments.iterations} updates")
    lines.append("")
    if arguments.plot is not None:
        lines.append(f"plot        {arguments.plot / 'plots' / 'lr_finder.png'}")
    lines.append(f"configured  {trainer.config.learning_rate:.2g}")
    if found.suggestion is None:
        return "\n".join([*lines, f"suggestion  none: {found.reason}"])
    rate = f"{found.suggestion:.2g}"
    words = [*program(), "train", str(arguments.config)]
    words += [f"--{name}={value}" for name, value in settings.items() if name != "training.learning_rate"]
    lines += [f"suggestion  {rate}", f"use it: {shlex.join([*words, f'--training.learning_rate={rate}'])}"]
    if len({round(ratio, 9) for ratio in group_ratios(trainer.optimizer)}) > 1:
        lines.append(
            "rates of their own, as layer_rates, were tried in their ratio to this one: change them by as much"
        )
    return "\n".join(lines)
