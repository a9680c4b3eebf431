"""The events of a run for the page: some at a time, from either end of the log."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import EventLog, LoggedEvent, logged_ranks
from pulsetrain.engine.recording.log.backwards import read_backwards
from pulsetrain.engine.recording.log.predicate import predicate
from pulsetrain.handlers.run_files.redaction import redacted

__all__ = ["events_of"]

_SHOWN = 200  # on one page
_SCANNED = 200_000  # events that one request looks at


def events_of(
    log: EventLog,
    *,
    where: str = "",
    types: Collection[str] | None = None,
    superseded: bool = False,
    after: int = 0,
    before: int | None = None,
    newest: bool = False,
) -> dict[str, Any]:
    """A page of the log's events, with what the next question needs.

    Args:
        log: of one rank.
        where: a condition of `pulsetrain events`; "" for none.
        types: only events of these types.
        superseded: also events that a resumed run has computed again.
        after: the first seq.
        before: the first seq that is not wanted any more, if the newest events come first.
        newest: the newest events come first.

    Returns:
        `events`; `next`, the `after` or the `before` of the next page, or None at the end; `end`, the `after` of events
        that are not complete yet; `looked`, how many events were looked at; `resumed`, how often the run has computed
        events again; and `kinds`, `ranks` and `damage` of the log.

    Raises:
        ConfigurationError: the condition is wrong, or cannot be computed on any event.
    """
    chosen = predicate(where) if where else None
    last = log.last()
    end = min([0 if last is None else last.seq + 1, *(event.seq for event in log.tail if event.open)])
    found, looked, following = list[LoggedEvent](), 0, None
    events = _newest_first(log, before, types, superseded) if newest else log.read(
        seq=(after, None), event=types, superseded=superseded
    )  # fmt: skip
    for event in events:
        looked += 1
        if chosen is None or chosen(event):
            found.append(event)
        if len(found) == _SHOWN or looked == _SCANNED:
            following = event.seq if newest else event.seq + 1
            break
    is_first = not after and before is None
    if chosen is not None and chosen.failure is not None and not found and is_first:
        raise ConfigurationError(f"where={where!r}: cannot be computed on any event: {chosen.failure}")
    return {
        "events": [redacted(msgspec.to_builtins(event)) for event in found], "next": following,
        "end": max(after, end), "looked": looked, "resumed": len(log.superseded),
        "kinds": log.event_types(), "ranks": logged_ranks(log.folder), "damage": [str(each) for each in log.damage],
    }  # fmt: skip


def _newest_first(
    log: EventLog, before: int | None, types: Collection[str] | None, superseded: bool
) -> Iterator[LoggedEvent]:
    for block in read_backwards(log, before, event=types, superseded=superseded):
        yield from reversed(block)
