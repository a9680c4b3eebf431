"""What `pulsetrain lr-find` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

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
