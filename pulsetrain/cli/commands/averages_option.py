"""The option of the commands that write weights: which ones, of a run that averaged them."""

from __future__ import annotations

import argparse

__all__ = ["add_averages"]


def add_averages(parser: argparse.ArgumentParser) -> None:
    """Declare `--no-averages`."""
    parser.add_argument(
        "--no-averages",
        dest="averages",
        action="store_false",
        help="the weights that were trained, also where the run validated with averages of them (EMA, SWA)",
    )
