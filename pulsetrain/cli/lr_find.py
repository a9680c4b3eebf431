"""`pulsetrain lr-find`: a learning-rate range test for a configuration."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import traceback
from pathlib import Path

from pulsetrain.cli.reports import FAILED, OK, program, until_closed
from pulsetrain.cli.results import logs_on_stderr
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

__all__ = ["run"]

ROWS = 12  # of the table
# settings that make a run write files or wait for a metric
_WITHOUT = ("run_dir", "save_every_n_epochs", "early_stopping_patience")


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
