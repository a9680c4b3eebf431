"""What `pulsetrain events` accepts, and its help."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from pulsetrain.cli.commands.rank_option import add_rank

__all__ = ["add_arguments"]

ARCHIVES = ("folder",)
HELP = "print the events that a run has recorded"
DESCRIPTION = """\
Print the events that a run has recorded, in order. A condition consists of an event's
fields (ord, engine, event, epoch, iteration, payload, output, metrics, lr,
error, observed, open, seq, t), constants, comparisons, and, or, not, arithmetic,
[...], in, abs(), len() and isnan().
"""
EPILOG = """\
examples:
  pulsetrain events runs/a --event validation_completed --where 'metrics["val/loss"] < 2' --fields epoch,metrics
  pulsetrain events runs/a --event iteration_completed --where 'isnan(output["loss"])'
  pulsetrain events runs/a --fields iteration,output.loss --format csv > loss.csv
  pulsetrain events runs/a --follow

exit status: 0 done, also where no event matches; 2 wrong input; 3 the log is damaged, and its readable part was printed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder or its archive")
    add_rank(parser)
    parser.add_argument("--engine", help="only events of this engine, such as trainer")
    parser.add_argument(
        "--event", action="append", help="only events of this type, such as epoch_completed; repeatable"
    )
    parser.add_argument("--from", dest="first", type=int, metavar="ITERATION", help="from this iteration on")
    parser.add_argument("--to", dest="last", type=int, metavar="ITERATION", help="up to this iteration")
    parser.add_argument(
        "--epoch",
        type=_range,
        default=(None, None),
        metavar="N[-M]",
        help="only events of this epoch, or of this range",
    )
    parser.add_argument("--where", metavar="CONDITION", help="only events for which this is true")
    parser.add_argument(
        "--fields",
        type=lambda text: [name.strip() for name in text.split(",")],
        help="the fields to print, such as epoch,output.loss",
    )
    parser.add_argument(
        "--format",
        choices=("table", "json", "csv"),
        default="table",
        help="the format of the output; json prints one object per line",
    )
    parser.add_argument(
        "--follow", action="store_true", help="wait for new events until the run ends or Ctrl-C is pressed"
    )
    parser.add_argument("--superseded", action="store_true", help="also print events that a resumed run has replaced")
    parser.add_argument(
        "--check", action="store_true", help="read the whole log and list damaged parts; print no events"
    )


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: choose an epoch such as 3, or a range such as 3-5")
    return int(match[1]), int(match[2] or match[1])
