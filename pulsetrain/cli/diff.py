"""`pulsetrain diff`: finds the first event in which two runs differ, and how the difference grows."""

from __future__ import annotations

import argparse
import json

from pulsetrain.cli.reports import DAMAGED, FAILED, OK, until_closed
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.diff.compare import diff
from pulsetrain.engine.recording.diff.ranks import diff_ranks

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Compare, print the result, and return it as the exit status."""
    if arguments.ranks:
        return _compare_ranks(arguments)
    if arguments.b is None:
        raise ConfigurationError("pulsetrain diff: needs two run folders, or one with --ranks")
    a, b = (EventLog(folder, arguments.rank) for folder in (arguments.a, arguments.b))
    found = diff(a, b, rtol=arguments.rtol, atol=arguments.atol)
    with until_closed():
        if arguments.format == "json":
            print(json.dumps(found.as_dict(growth=not arguments.first)))
        else:
            print(plain(found.report(growth=not arguments.first), keep="\n"))
    if found:
        return FAILED
    return DAMAGED if found.damage else OK


def _compare_ranks(arguments: argparse.Namespace) -> int:
    if arguments.b is not None:
        raise ConfigurationError("pulsetrain diff --ranks: compares the processes of one run; leave the second one out")
    for name in ("rank", "rtol", "atol"):
        if getattr(arguments, name):
            raise ConfigurationError(
                f"pulsetrain diff --ranks: compares bit for bit, and all ranks; leave --{name} out"
            )
    if arguments.first:
        raise ConfigurationError("pulsetrain diff --ranks: always shows the first difference alone; leave --first out")
    found = diff_ranks(arguments.a)
    with until_closed():
        print(json.dumps(found.as_dict()) if arguments.format == "json" else plain(str(found), keep="\n"))
    if found:
        return FAILED
    return DAMAGED if found.damage else OK
