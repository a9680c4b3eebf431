"""`pulsetrain events`: what a run's log holds, filtered, in the form that is wanted."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pulsetrain.cli.command import command, no_settings
from pulsetrain.cli.pipe import until_closed
from pulsetrain.cli.reports import OK
from pulsetrain.engine.recording import EventLog, LoggedEvent
from pulsetrain.engine.recording.log.predicate import predicate
from pulsetrain.export.event_formats import FORMATS, check_field

__all__ = ["add_parser", "follow"]

DAMAGED = 3
POLL = 0.5  # seconds
DESCRIPTION = """\
Print the events that a run has recorded, in their order. A condition is made of an
event's fields (ord, engine, event, epoch, iteration, payload, output, metrics, lr,
error, observed, open, seq, t), constants, comparisons, and, or, not, arithmetic,
[...], in, abs(), len() and isnan().
"""
EPILOG = """\
examples:
  pulsetrain events runs/a --event validation_completed --where 'metrics["val/loss"] < 2' --fields epoch,metrics
  pulsetrain events runs/a --event iteration_completed --where 'isnan(output["loss"])'
  pulsetrain events runs/a --fields iteration,output.loss --format csv > loss.csv
  pulsetrain events runs/a --follow

exit status: 0 done; 2 wrong input; 3 the log is damaged, and what can be read of it was
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "events",
        run,
        help="print the events that a run has recorded",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument("--rank", metavar="N", type=int, default=0, help="whose log, where several processes recorded")
    parser.add_argument("--engine", help="events of this engine alone, such as trainer")
    parser.add_argument("--event", action="append", help="events of this type, such as epoch_completed; repeatable")
    parser.add_argument("--from", dest="first", type=int, metavar="ITERATION", help="from this iteration on")
    parser.add_argument("--to", dest="last", type=int, metavar="ITERATION", help="up to this iteration")
    parser.add_argument("--epoch", type=_range, default=(None, None), metavar="N[-M]", help="of this epoch, or these")
    parser.add_argument("--where", metavar="CONDITION", help="events of which this is true")
    parser.add_argument(
        "--fields", type=lambda text: [name.strip() for name in text.split(",")], help="such as epoch,output.loss"
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="json: an object a line")
    parser.add_argument("--follow", action="store_true", help="go on as the run does, until it ends or Ctrl-C")
    parser.add_argument("--superseded", action="store_true", help="also what a resumed run has computed again")
    parser.add_argument("--check", action="store_true", help="read everything and list what is damaged, no events")


def run(arguments: argparse.Namespace, settings: Mapping[str, str]) -> int:
    """Print the events; what is damaged goes to standard error."""
    no_settings("events", settings)
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
    if silent and arguments.format == "table":
        print(f"pulsetrain: no event of {log.folder} is so; its engines: {', '.join(log.engines)}", file=sys.stderr)
    for damage in log.damage:
        print(f"pulsetrain: damaged: {damage}", file=sys.stderr)
    return DAMAGED if log.damage else OK


def follow(
    log: EventLog, where: Callable[[LoggedEvent], Any] | None, wait: Callable[[float], Any], **filters: Any
) -> Iterator[LoggedEvent]:
    """The events of a log that is still being written, until it ends.

    One whose values are not known yet comes when they are, behind events that began later.

    Args:
        log: the log.
        where: says of an event whether it is wanted.
        wait: called with a time in seconds between two looks.
        filters: those of `EventLog.read`.
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
        state = "ended" if log.ended else "not closed: the run is still going, was killed, or the end is missing"
        print(f"{log.folder}: {len(log):,} events, {state}; {'damaged' if damage else 'no damage'}")
        for each in damage:
            print(f"  {each}")
    return DAMAGED if damage else OK


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: choose an epoch such as 3, or a range such as 3-5")
    return int(match[1]), int(match[2] or match[1])
