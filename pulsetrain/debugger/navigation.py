"""Finds events of a log from the current one: by count, type or iteration, forward and back at the same cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from pulsetrain.engine.recording import EventLog, LoggedEvent
from pulsetrain.engine.recording.log.reader import ReadOptions
from pulsetrain.engine.recording.replay.payloads import whole
from pulsetrain.engine.recording.replay.source import Past, Source

__all__ = ["BEFORE_FIRST", "Navigator"]

BEFORE_FIRST = -1  # smaller than the seq of any event


class Navigator:
    """Finds events of a log, except superseded ones. A position in it is an event's seq.

    Args:
        log: the log.
        engine: the engine whose iterations and epochs count.
    """

    def __init__(self, log: EventLog, engine: str) -> None:
        self._log, self._engine = log, engine
        self._source = Source(log)
        self._headers, self._superseded = log.headers, log.superseded
        self.past: Past = Past(self._source)

    @property
    def first_seq(self) -> int | None:
        """The first seq; None if there are no events."""
        return self._source.span(0)[0] if len(self._source) else None

    @cached_property
    def last_event(self) -> LoggedEvent | None:
        """The last event."""
        return next((events[-1] for index in self._backward() if (events := self._source.events(index))), None)

    def types(self, engine: str) -> list[str]:
        """The types of an engine's events."""
        return self._source.types(engine)

    def ahead(self, at: int, count: int) -> LoggedEvent | None:
        """The event this many positions after `at`, or the last event; None if there is none after `at`."""
        for index in self._forward(at):
            size = self._size(index) if self._source.span(index)[0] > at else None
            if size is not None and size < count:
                count -= size  # skipped without decoding
                continue
            events = self._source.events(index, at)
            if len(events) >= count:
                return events[count - 1]
            count -= len(events)
        return self.last_event if self.last_event is not None and self.last_event.seq > at else None

    def before(self, at: int, count: int) -> LoggedEvent | None:
        """The event this many positions before `at`; None if there are fewer."""
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
        """This many events up to and including `at`, and as many after it."""
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
        """The next wanted event after `at`, or the last before it; of these types, None for any."""
        source = self._source
        by_engine = None if types is None else dict.fromkeys(self._log.engines, types)
        for index in self._forward(at) if forward else self._backward(at):
            events = source.events(index) if by_engine is None else source.select(index, by_engine)
            for event in events if forward else reversed(events):
                if (event.seq > at if forward else event.seq < at) and wanted(whole(event)):
                    return event
        return None

    def first(self, name: str, value: int) -> LoggedEvent | None:
        """The first event of an "iteration" or "epoch", or of the next one if that has none; or from a "seq" on."""
        if name == "seq":
            return next(self._log.read(seq=(value, None)), None)
        for upto in (value, None):
            bounds: ReadOptions = {"engine": self._engine}
            bounds["iteration" if name == "iteration" else "epoch"] = (value, upto)
            observed = None
            for event in self._log.read(**bounds):
                if event.ord >= 0:
                    return event
                observed = observed or event  # observed events are never superseded: it may be of an earlier attempt
            if observed is not None:
                return observed
        return None

    def _forward(self, at: int) -> range:
        return range(self._source.index_of(at + 1), len(self._source))

    def _backward(self, at: int | None = None) -> range:
        last = len(self._source) - 1
        if at is not None:
            last = min(self._source.index_of(at), last) if at > BEFORE_FIRST else -1
        return range(last, -1, -1)

    def _size(self, index: int) -> int | None:
        """Number of events in a block, from its header; None if some are superseded, or it has no header."""
        if index >= len(self._headers):
            return None
        first, last = self._source.span(index)
        superseded = any(after < last and first < seam for after, seam in self._superseded)
        return None if superseded else self._headers[index].count
