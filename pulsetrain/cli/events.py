"""`pulsetrain events`: prints the events of a run's log, filtered, in several formats."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from pulsetrain.cli.reports import DAMAGED, OK, report_damage, until_closed
from pulsetrain.engine.errors import ConfigurationError, did_you_mean
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording import EventLog, LoggedEvent
from pulsetrain.engine.recording.log.predicate import predicate
from pulsetrain.engine.recording.log.reader import logged_ranks
from pulsetrain.export.event_formats import FORMATS, check_field

__all__ = ["run", "follow"]

POLL = 0.5  # seconds


def run(arguments: argparse.Namespace) -> int:
    """Print the events, and damaged parts on standard error."""
    if arguments.check:
        _refuse_with_check(arguments)
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

    def noticed() -> Iterator[LoggedEvent]:
        nonlocal silent
        for event in events:
            silent = False
            yield event

    with until_closed():
        try:
            for line in FORMATS[arguments.format](noticed(), arguments.fields, arguments.follow):
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
    for line in _why_silent(log, arguments, silent=silent):
        print(f"pulsetrain: {plain(line)}", file=sys.stderr)
    return report_damage(log.damage)


def _why_silent(log: EventLog, arguments: argparse.Namespace, *, silent: bool) -> Iterator[str]:
    """What explains that no event matched, and the names that the log does not have and that resemble one of its."""
    if silent:
        hint = did_you_mean(arguments.engine, log.engines) if arguments.engine not in (None, *log.engines) else ""
        yield f"no event of {log.label} matches; its engines: {', '.join(log.engines)}{hint}"
    there = log.event_types() if arguments.event else []
    for name in (name for name in arguments.event or () if name not in there):
        from pulsetrain.engine.events.names import Events  # torch comes with them

        shipped = [event.value for event in Events]
        hint = did_you_mean(name, [*there, *shipped]) if name not in shipped else ""
        if silent or hint:
            hint = hint or f"; it has {', '.join(there) or 'none'}"
            yield f"--event {name}: no event of {log.label} has this type{hint}"


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


def _refuse_with_check(arguments: argparse.Namespace) -> None:
    """--check reads the whole log, whatever else was asked for."""
    for option, given in {
        "--engine": arguments.engine is not None,
        "--event": bool(arguments.event),
        "--from": arguments.first is not None,
        "--to": arguments.last is not None,
        "--epoch": arguments.epoch != (None, None),
        "--where": arguments.where is not None,
        "--fields": arguments.fields is not None,
        "--format": arguments.format != "table",
        "--follow": arguments.follow,
        "--superseded": arguments.superseded,
    }.items():
        if given:
            raise ConfigurationError(
                f"pulsetrain events --check: reads the whole log and prints no events; leave {option} out"
            )


def _check(log: EventLog) -> int:
    damage = log.verify()
    with until_closed():
        state = "ended" if log.ended else "not closed: the run is still going or was killed, or the end is missing"
        ranks = logged_ranks(log.folder)
        which = f", rank {log.rank} of {', '.join(map(str, ranks))}" if len(ranks) > 1 else ""
        print(f"{plain(str(log.label))}{which}: {len(log):,} events, {state}; {'damaged' if damage else 'no damage'}")
        for each in damage:
            print(f"  {each}")
    return DAMAGED if damage else OK
