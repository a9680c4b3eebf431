"""The command line: `pulsetrain train CONFIG`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from engine.errors import PulsetrainError
from pulsetrain.cli import train

__all__ = ["main"]

OK, FAILED, USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0 done, 1 the run failed, 2 wrong input, 128 + n stopped by signal n."""
    parser = argparse.ArgumentParser(prog="pulsetrain", description="Train models, and record what happens.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train.add_parser(commands)
    chosen, rest = parser.parse_known_args(arguments)
    try:
        status: int = chosen.run(chosen, rest)
    except PulsetrainError as error:
        return report(error)
    except KeyboardInterrupt:
        print("pulsetrain: stopped at once by a second Ctrl-C", file=sys.stderr)
        return 130
    return status


def report(error: BaseException, status: int = USAGE) -> int:
    """Say an error on standard error, with what was noted on its way, and without a traceback."""
    text = str(error) or type(error).__name__
    if not isinstance(error, PulsetrainError):
        text = f"{type(error).__name__}: {text}"
    print(f"pulsetrain: error: {text}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(f"  {note}", file=sys.stderr)
    return status
