"""`pulsetrain diff`: where two runs part, and how far."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pulsetrain.cli.command import command, no_settings
from pulsetrain.cli.pipe import until_closed
from pulsetrain.cli.reports import FAILED, OK
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.diff.compare import diff

__all__ = ["add_parser"]

DAMAGED = 3
DESCRIPTION = """\
Compare the event logs of two runs: what must come again to the bit when a run is
repeated. Times and throughput never count, nor does what a resumed run has
computed again.
"""
EPILOG = """\
examples:
  pulsetrain diff runs/a runs/b
  pulsetrain diff runs/cpu runs/gpu --rtol 1e-5

exit status: 0 the logs agree; 1 they differ; 2 they cannot be compared; 3 they agree as far as they can be read, but
one is damaged
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "diff",
        run,
        help="compare two runs event by event",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("a", metavar="A", type=Path, help="a run folder")
    parser.add_argument("b", metavar="B", type=Path, help="another")
    parser.add_argument("--rank", metavar="N", type=int, default=0, help="whose logs, where several processes recorded")
    parser.add_argument("--rtol", type=float, default=0.0, help="floats agree that differ by at most this part of them")
    parser.add_argument("--atol", type=float, default=0.0, help="or by at most this much")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of what is printed")
    parser.add_argument(
        "--first", action="store_true", help="the first difference alone: what is behind it is not read"
    )


def run(arguments: argparse.Namespace, settings: Mapping[str, str]) -> int:
    """Compare, print, and say by the exit status what came out."""
    no_settings("diff", settings)
    a, b = (EventLog(folder, arguments.rank) for folder in (arguments.a, arguments.b))
    found = diff(a, b, rtol=arguments.rtol, atol=arguments.atol)
    with until_closed():
        if arguments.format == "json":
            print(json.dumps(found.as_dict(growth=not arguments.first)))
        else:
            print(found.report(growth=not arguments.first))
    if found:
        return FAILED
    return DAMAGED if found.damage else OK
