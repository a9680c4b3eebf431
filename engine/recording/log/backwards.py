"""Reads a log from its end, so that the newest events of a long run are there at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pulsetrain.engine.recording.log.reader import EventLog
from pulsetrain.engine.recording.log.records import LoggedEvent

__all__ = ["read_backwards"]


def read_backwards(
    log: EventLog, before: int | None = None, *, event: str | Collection[str] | None = None, superseded: bool = False
) -> Iterator[list[LoggedEvent]]:
    """The events of each block, the newest block first; within a block, the oldest event is the first.

    Args:
        log: the log.
        before: only events before this seq; None for all.
        event: only events of this type, or of these types.
        superseded: also events that a resumed run has computed again.
    """
    last = None if before is None else before - 1
    sealed = max((header.seq[1] for header in log.headers), default=-1)
    if last is None or last > sealed:
        yield list(log.read(seq=(sealed + 1, last), event=event, superseded=superseded))
    for header in reversed(log.headers):
        first, newest = header.seq
        if last is None or first <= last:
            end = newest if last is None else min(newest, last)
            yield list(log.read(seq=(first, end), event=event, superseded=superseded))
