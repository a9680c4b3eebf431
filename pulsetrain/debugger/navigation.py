"""Finds events of a log from where one stands: so many on or back, of a kind, of an iteration; either way as fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from pulsetrain.engine.recording import EventLog, LoggedEvent
from pulsetrain.engine.recording.replay.payloads import whole
from pulsetrain.engine.recording.replay.source import Past, Source

__all__ = ["BEGINNING", "Places"]

BEGINNING = -1  # the seq of no event, before the first


class Places:
    """The events of a log, without those that a resumed run has computed again. A place is an event's seq.

    Args:
        log: the log.
        engine: whose iterations and epochs count.
    """

    def __init__(self, log: EventLog, engine: str) -> None:
        self._log, self._engine = log, engine
        self._source = Source(log)
        self._headers, self._superseded = log.headers, log.superseded
        self.past = Past(self._source)

    @property
    def start(self) -> int | None:
        """The first seq; None where there are no events."""
        return self._source.span(0)[0] if len(self._source) else None

    @cached_property
    def end(self) -> LoggedEvent | None:
        """The last event."""
        return next((events[-1] for index in self._backward() if (events := self._source.events(index))), None)

    def types(self, engine: str) -> list[str]:
        """The types of events that the log holds of an engine."""
        return sorted(self._source.types(engine))

    def ahead(self, at: int, count: int) -> LoggedEvent | None:
        """The event so many places on, or the last; None where there is none behind this place."""
        for index in self._forward(at):
            size = self._size(index) if self._source.span(index)[0] > at else None
            if size is not None and size < count:
                count -= size  # not decoded
                continue
            events = self._source.events(index, at)
            if len(events) >= count:
                return events[count - 1]
            count -= len(events)
        return self.end if self.end is not None and self.end.seq > at else None

    def before(self, at: int, count: int) -> LoggedEvent | None:
        """The event so many places back; None where there are not so many."""
        for index in self._backward(at):
            size = self._size(index) if self._source.span(index)[1] < at else None
            if size is not None and size < count:
                count -= size
                continue
            events = self._source.events(index, -1, at - 1)
            if len(events) >= count:
                return events[-count]
            count -= len(events)
        return None

    def around(self, at: int, count: int) -> tuple[list[LoggedEvent], list[LoggedEvent]]:
        """So many events up to this place, that included, and so many behind it."""
        blocks: list[list[LoggedEvent]] = []
        after: list[LoggedEvent] = []
        left = count
        for index in self._backward(at):
            if left <= 0:
                break
            blocks.append(self._source.events(index, -1, at)[-left:])
            left -= len(blocks[-1])
        for index in self._forward(at):
            if len(after) >= count:
                break
            after += self._source.events(index, at)[: count - len(after)]
        return [whole(each) for block in reversed(blocks) for each in block], [whole(each) for each in after]

    def find(
        self, at: int, wanted: Callable[[LoggedEvent], bool], types: set[str] | None, *, forward: bool
    ) -> LoggedEvent | None:
        """The next event that is wanted, or the last before this place; of these types, None for any."""
        source = self._source
        by_engine = None if types is None else dict.fromkeys(self._log.engines, types)
        for index in self._forward(at) if forward else self._backward(at):
            events = source.events(index) if by_engine is None else source.select(index, by_engine)
            for event in events if forward else reversed(events):
                if (event.seq > at if forward else event.seq < at) and wanted(whole(event)):
                    return event
        return None

    def first(self, name: str, value: int) -> LoggedEvent | None:
        """The first event of an "iteration" or an "epoch", or from a "seq" on; where there is none, of the next."""
        if name == "seq":
            return next(self._log.read(seq=(value, None)), None)
        for upto in (value, None):
            bounds: dict[str, Any] = {name: (value, upto)}
            observed = None
            for event in self._log.read(engine=self._engine, **bounds):
                if event.ord >= 0:
                    return event
                observed = observed or event  # it may be of a time that was computed again
            if observed is not None:
                return observed
        return None

    def _forward(self, at: int) -> range:
        return range(self._source.index_of(at + 1), len(self._source))

    def _backward(self, at: int | None = None) -> range:
        last = len(self._source) - 1
        if at is not None:
            last = min(self._source.index_of(at), last) if at > BEGINNING else -1
        return range(last, -1, -1)

    def _size(self, index: int) -> int | None:
        """How many events a block holds, where its header tells; None where some were computed again."""
        if index >= len(self._headers):
            return None
        first, last = self._source.span(index)
        again = any(after < last and first < seam for after, seam in self._superseded)
        return None if again else self._headers[index].count
