"""`pulsetrain lr-find`: a learning-rate range test for a configuration."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import traceback
from pathlib import Path

from pulsetrain.cli.reports import FAILED, OK, logs_on_stderr, program, until_closed
from pulsetrain.configuration.assemble import assemble
from pulsetrain.configuration.messages import in_settings
from pulsetrain.configuration.parse import read_config
from pulsetrain.configuration.rebuild import base_of
from pulsetrain.engine.errors import PulsetrainError
from pulsetrain.engine.optimizers import LEARNING_RATE
from pulsetrain.engine.schedules import group_ratios
from pulsetrain.handlers import LRFinder
from pulsetrain.handlers.learning_rate.lr_finder import LRFinderResult
from pulsetrain.trainer import Trainer

__all__ = ["add_arguments"]

ROWS = 12  # of the table
# settings that make a run write files or wait for a metric
_WITHOUT = ("run_dir", "save_every_n_epochs", "early_stopping_patience")
HELP = "find a learning rate for a configuration"
SYNOPSIS = (
    "pulsetrain lr-find CONFIG [--start RATE] [--end RATE] [--iterations N] [--plot FOLDER] "
    "[--SECTION.SETTING VALUE ...]"
)
DESCRIPTION = """\
Train a few updates at growing learning rates, from the initial weights of a run of this
configuration, and suggest the rate at which the smoothed loss falls fastest. Nothing is
written except the plot, if one is asked for. Handlers and validation sets are not used.

Settings of the configuration can be overridden: --training.optimizer sgd
"""
EPILOG = """\
examples:
  pulsetrain lr-find config.yaml
  pulsetrain lr-find config.yaml --start 1e-5 --end 1 --iterations 200 --plot found --training.optimizer sgd

exit status: 0 a rate is suggested; 1 no rate is suggested, and the reason is printed; 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the configuration file, in YAML")
    parser.add_argument("--start", metavar="RATE", type=float, default=1e-7, help="the first rate [1e-7]")
    parser.add_argument("--end", metavar="RATE", type=float, default=10.0, help="the last rate [10]")
    parser.add_argument("--iterations", metavar="N", type=int, default=100, help="the number of updates [100]")
    parser.add_argument("--plot", metavar="FOLDER", type=Path, help="write FOLDER/plots/lr_finder.png and .svg")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")


def run(arguments: argparse.Namespace) -> int:
    """Run the test; print the table, the suggestion and the command that uses it."""
    finder = LRFinder(arguments.start, arguments.end, arguments.iterations, folder=arguments.plot)
    with logs_on_stderr(), tempfile.TemporaryDirectory(prefix="lr-find-") as temporary:
        try:
            config = read_config(arguments.config, arguments.settings)
            training = {name: value for name, value in (config.get("training") or {}).items() if name not in _WITHOUT}
            config |= {"handlers": [], "training": training}
            trainer = assemble(config, base_of(arguments.config.parent), Path(temporary) / "run").trainer
            print(f"training {arguments.iterations} updates at growing rates ...", file=sys.stderr)
            found = finder.run(trainer)
        except Exception as error:
            if arguments.traceback:
                traceback.print_exc()
            if isinstance(error, PulsetrainError):
                raise in_settings(error) from error
            error.add_note("--traceback shows where in the code")
            raise
    with until_closed():
        print(_report(found, trainer, arguments))
    return FAILED if found.suggestion is None else OK


def _report(found: LRFinderResult, trainer: Trainer, arguments: argparse.Namespace) -> str:
    lines = ["", f"{'learning rate':>13}{'loss':>12}{'mean':>12}"]
    rows = range(len(found.rates))
    shown = {round(number * (len(rows) - 1) / (ROWS - 1)) for number in range(ROWS)}
    for row in rows:
        suggested = found.rates[row] == found.suggestion
        if row in shown or suggested:
            mark = "  <- falls fastest" if suggested else ""
            lines.append(f"{found.rates[row]:>13.2e}{found.losses[row]:>12.4g}{found.smoothed[row]:>12.4g}{mark}")
    if found.diverged:
        lines.append(f"the loss diverged after {len(found.rates)} of {arguments.iterations} updates")
    lines.append("")
    if arguments.plot is not None:
        lines.append(f"plot        {arguments.plot / 'plots' / 'lr_finder.png'}")
    configured = trainer.config.learning_rate
    lines.append(f"configured  {LEARNING_RATE if configured is None else configured:.2g}")
    if found.suggestion is None:
        return "\n".join([*lines, f"suggestion  none: {found.reason}"])
    rate = f"{found.suggestion:.2g}"
    words = [*program(), "train", str(arguments.config)]
    words += [f"--{name}={value}" for name, value in arguments.settings.items() if name != "training.learning_rate"]
    lines += [f"suggestion  {rate}", f"use it: {shlex.join([*words, f'--training.learning_rate={rate}'])}"]
    if len({round(ratio, 9) for ratio in group_ratios(trainer.optimizer)}) > 1:
        lines.append("rates of parameter groups, such as layer_rates, kept their ratio to this one: scale them as well")
    return "\n".join(lines)
