"""`pulsetrain events`: prints the events of a run's log, filtered, in several formats."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pulsetrain.cli.reports import DAMAGED, OK, report_damage, until_closed
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import EventLog, LoggedEvent
from pulsetrain.engine.recording.log.predicate import predicate
from pulsetrain.export.event_formats import FORMATS, check_field

__all__ = ["add_arguments", "follow"]

POLL = 0.5  # seconds
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

exit status: 0 done; 2 wrong input; 3 the log is damaged, and its readable part was printed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument("--rank", metavar="N", type=int, default=0, help="which process's log, where several recorded")
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
        "--format", choices=FORMATS, default="table", help="the format of the output; json prints one object per line"
    )
    parser.add_argument(
        "--follow", action="store_true", help="wait for new events until the run ends or Ctrl-C is pressed"
    )
    parser.add_argument("--superseded", action="store_true", help="also print events that a resumed run has replaced")
    parser.add_argument(
        "--check", action="store_true", help="read the whole log and list damaged parts; print no events"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the events, and damaged parts on standard error."""
    for name in arguments.fields or ():
        check_field(name)
    where = None if arguments.where is None else predicate(arguments.where)
    log = EventLog(arguments.folder, arguments.rank)
    if arguments.check:
        return _check(log)
    filters = {
        "engine": arguments.engine,
        "event": arguments.event,
        "iteration": (arguments.first, arguments.last),
        "epoch": arguments.epoch,
        "superseded": arguments.superseded,
    }
    events = follow(log, where, time.sleep, **filters) if arguments.follow else log.read(where=where, **filters)
    silent = True
    with until_closed():
        try:
            for line in FORMATS[arguments.format](events, arguments.fields, arguments.follow):
                silent = False
                sys.stdout.write(line)
                if arguments.follow:
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if not arguments.follow:
                raise
    failure = where.failure if where is not None else None
    if failure is not None:
        rule = f"cannot be computed on any event: {failure}; correct the condition"
        raise ConfigurationError(f"--where {arguments.where!r}: {rule}")
    if silent and arguments.format == "table":
        print(f"pulsetrain: no event of {log.folder} matches; its engines: {', '.join(log.engines)}", file=sys.stderr)
    return report_damage(log.damage)


def follow(
    log: EventLog, where: Callable[[LoggedEvent], Any] | None, wait: Callable[[float], Any], **filters: Any
) -> Iterator[LoggedEvent]:
    """The events of a log that is still being written, until it ends.

    An event whose values are still to come is yielded once they are known, after events that started later.

    Args:
        log: the log.
        where: whether an event is wanted.
        wait: called between two reads, with a time in seconds.
        filters: the filters of `EventLog.read`.
    """
    last = -1
    unfinished: set[int] = set()
    while True:
        ended = log.ended
        for event in log.read(seq=(min(unfinished, default=last + 1), None), **filters):
            if event.seq <= last and event.seq not in unfinished:
                continue
            last = max(last, event.seq)
            if event.open and not ended:
                unfinished.add(event.seq)
                continue
            unfinished.discard(event.seq)
            if where is None or where(event):
                yield event
        if ended:
            return
        wait(POLL)
        log.refresh()


def _check(log: EventLog) -> int:
    damage = log.verify()
    with until_closed():
        state = "ended" if log.ended else "not closed: the run is still going or was killed, or the end is missing"
        print(f"{log.folder}: {len(log):,} events, {state}; {'damaged' if damage else 'no damage'}")
        for each in damage:
            print(f"  {each}")
    return DAMAGED if damage else OK


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: choose an epoch such as 3, or a range such as 3-5")
    return int(match[1]), int(match[2] or match[1])
