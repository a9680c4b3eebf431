"""Which events of a log are read, and which blocks are unpacked for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pulsetrain.engine.recording.log.blocks import Header
from pulsetrain.engine.recording.log.index import Index, Reach
from pulsetrain.engine.recording.log.records import LoggedEvent

__all__ = ["Query", "Range"]

Range = tuple[int | None, int | None]  # first and last, both included; None for no bound
_UNBOUNDED: Range = (None, None)


class Query:
    """Which events to read, and which blocks may hold one.

    Args:
        engine: only events of this engine; None for all.
        events: only events of these types; None for all.
        seq: first and last seq, both included.
        iteration: first and last iteration.
        epoch: first and last epoch.
    """

    engine: str | None
    events: frozenset[str] | None
    seq: Range
    iteration: Range
    epoch: Range
    everything: bool

    def __init__(
        self, engine: str | None, events: frozenset[str] | None, seq: Range, iteration: Range, epoch: Range
    ) -> None:
        self.engine, self.events = engine, events
        self.seq, self.iteration, self.epoch = seq, iteration, epoch
        self.everything = engine is None and events is None and seq == iteration == epoch == _UNBOUNDED

    def wants(self, event: LoggedEvent) -> bool:
        """Whether the event is one of them."""
        return (
            (self.engine is None or event.engine == self.engine)
            and (self.events is None or event.event in self.events)
            and _overlap(event.seq, event.seq, self.seq)
            and _overlap(event.iteration, event.iteration, self.iteration)
            and _overlap(event.epoch, event.epoch, self.epoch)
        )

    def blocks(self, index: Index) -> Iterable[int]:
        """Numbers of the blocks that may hold one; headers are decoded only to look for event names."""
        near = index.between(self.seq)
        if self.engine is None and self.iteration == self.epoch == _UNBOUNDED:
            found: Iterable[int] = near
        else:
            reaches = [reach for engine, reach in index.engines.items() if self.engine in (None, engine)]
            found = sorted({number for reach in reaches for number in self._reached(reach, near)})
        return (number for number in found if self._names(index.header(number))) if self.events is not None else found

    def _reached(self, reach: Reach, near: range) -> Iterator[int]:
        (first, last), (first_epoch, last_epoch) = reach.iteration, reach.epoch
        for number in near:
            if (
                last[number] >= 0
                and _overlap(first[number], last[number], self.iteration)
                and _overlap(first_epoch[number], last_epoch[number], self.epoch)
            ):
                yield number

    def _names(self, header: Header) -> bool:
        """Whether the block holds an event of the wanted types; of the wanted engine, if there is one."""
        assert self.events is not None
        parts = header.engines.values() if self.engine is None else [header.engines[self.engine]]
        return any(not self.events.isdisjoint(part.events) for part in parts)


def _overlap(first: int, last: int, bounds: Range) -> bool:
    low, high = bounds
    return (low is None or last >= low) and (high is None or first <= high)
