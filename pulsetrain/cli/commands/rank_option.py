"""The option of the commands that read one log: of which process."""

from __future__ import annotations

import argparse

__all__ = ["add_rank"]


def add_rank(parser: argparse.ArgumentParser) -> None:
    """Declare `--rank`, whose value is given to `EventLog`; that refuses a rank without a log."""
    parser.add_argument("--rank", metavar="N", type=int, default=0, help="which process's log, where several recorded")
