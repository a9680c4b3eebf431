"""The command line: `pulsetrain train CONFIG`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0 done; 1 the run failed; 2 wrong input; 128 + n stopped by signal n.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as with >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for the whole process
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a text sample may have characters that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("\npulsetrain: stopped", file=sys.stderr)
        return 130


def _run(arguments: Sequence[str]) -> int:
    # imported here, where Ctrl-C is caught: importing torch takes a second or two
    from pulsetrain.cli.parser import make_parser, run_command
    from pulsetrain.cli.reports import USAGE, report
    from pulsetrain.cli.settings import reject_settings, split_settings

    parser = make_parser()
    try:
        words, settings = split_settings(arguments)
        chosen = parser.parse_args(words, argparse.Namespace(settings=settings))
        if chosen.command is None:
            parser.print_help(sys.stderr)
            return USAGE
        reject_settings(chosen.command, settings)
        return run_command(chosen)
    except SystemExit as leaving:  # argparse has printed the reason
        return leaving.code if isinstance(leaving.code, int) else USAGE
    except Exception as error:
        return report(error)
