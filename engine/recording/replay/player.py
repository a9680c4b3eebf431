"""Plays the events of a log to the handlers of replayed engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from pulsetrain.engine.events.compiled import Dispatch
from pulsetrain.engine.events.dispatch import Dispatcher, deliver, deliver_to
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.subscription import Order, Phase
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.engine.recording.replay.delivery import END, Open, Place, is_custom, is_host
from pulsetrain.engine.recording.replay.engine import ReplayBus, ReplayedEngine
from pulsetrain.engine.recording.replay.pace import Pace
from pulsetrain.engine.recording.replay.payloads import whole
from pulsetrain.engine.recording.replay.receivers import Receivers
from pulsetrain.engine.recording.replay.source import Ahead, Past, Source
from pulsetrain.engine.recording.replay.state import Stop
from pulsetrain.engine.recording.replay.weights import NearestWeights

__all__ = ["Player"]

Until = Callable[[LoggedEvent], object]

_STARTS = frozenset({Events.STARTED.value, Events.EPOCH_STARTED.value})


class Player:
    """A position in a log, and what it takes to move it forward.

    Args:
        source: the log's events.
        main: the name of the engine that is replayed.
        pace: how fast.
        weights: those that go with the position.
        obey_terminate: end where a handler of the main engine calls `terminate()`.
        deliver_fired: deliver the events that handlers fire.
    """

    def __init__(
        self,
        source: Source,
        main: str,
        pace: Pace,
        weights: NearestWeights | None,
        *,
        obey_terminate: bool,
        deliver_fired: bool,
    ) -> None:
        self.bus: ReplayBus = ReplayBus()
        self.engines: dict[str, ReplayedEngine] = {}  # by name; added by the replay
        self.event: LoggedEvent | None = None  # that is being played, or was played last
        self.fired: list[Event] = []  # by replayed handlers; seq is that of the event they handled
        self.stops: list[Stop] = []
        self.past: Past = Past(source)
        self._ahead = Ahead(source)
        self._main = main
        self._pace = pace
        self._weights = weights
        self._obeys, self._delivers = obey_terminate, deliver_fired
        self._receivers = Receivers(())
        self._reached = -1  # the last seq played
        self._reach: tuple[int, int] = (-1, -1)
        self._stopping: Stop | None = None  # to be obeyed at the next safe point
        self._obeyed: Stop | None = None  # where the replay ended
        self._open: list[Open] = []  # events some of whose handlers wait until the events fired in them were played
        self._recalled: deque[LoggedEvent] = deque()  # played when a handler fired them again; `until` waits for them

    def reach(self) -> int:
        """The seq up to which the state is known: that of the last validation made in the present event."""
        event = self.event
        if event is None or self._receivers.are_nested or not is_host(event.event):
            return self._reached
        if self._reach[0] != event.seq:
            end, opened = event.seq, Open(event)
            for following in self.past.following(event.seq):
                if not opened.contains(following) or opened.place_of(following) > (Phase.ACT, Order.REGISTERED):
                    break
                end = following.seq
            self._reach = event.seq, end
        return max(self._reached, self._reach[1])

    def bounds(self, engine: str) -> dict[str, Any]:
        """What the log says about the length of the engine's run."""
        last = self.past.last(engine, _STARTS, self._reached)
        payload = whole(last).payload if last is not None else None
        return payload if isinstance(payload, dict) else {}

    def completes(self, terminated: LoggedEvent) -> bool:
        """Whether the run that was terminated here fired COMPLETED."""
        if self._obeyed is not None:
            return not self._obeyed.skip_completed
        for event in self.past.following(terminated.seq):
            if event.engine == terminated.engine and event.event in (Events.COMPLETED.value, Events.STARTED.value):
                return bool(event.event == Events.COMPLETED.value)
        return False

    def note_fired(self, engine: Dispatcher, dispatch: Dispatch, event: Event) -> None:
        """A handler has fired an event."""
        self.fired.append(event)
        if self._receivers.are_recalled and is_custom(event.type) and self._recall(event):
            return
        if self._delivers and dispatch.connected:
            with self.bus.sequence.observing() if event.observed else nullcontext():
                deliver(engine, dispatch, event, event.seq)

    def seek(self, seq: int) -> None:
        """Continue at the event with this seq, or at the first after it, without calling handlers."""
        self._stopping = self._obeyed = None
        self._reached = seq - 1
        self._drop_unfinished()
        before = [self.past.last(name, None, seq - 1) for name in self.engines]
        self.event = max([event for event in before if event is not None], key=lambda event: event.seq, default=None)

    def play(self, until: Until | None) -> None:
        """Play to the end, or through the first event for which `until` is true."""
        try:
            self._play(until)
        except BaseException:
            self._drop_unfinished()
            raise

    def _drop_unfinished(self) -> None:
        """Call no more handlers of events that were played in part, and continue after the last one that was begun."""
        self._open.clear()
        self._recalled.clear()
        self._ahead.continue_at(self._reached + 1)

    def _play(self, until: Until | None) -> None:
        ahead = self._ahead
        ahead.reads_all = until is not None
        self._refresh()
        while self._obeyed is None:
            if ahead.first(self._receivers.wanted) is None:
                if self._offer(until):
                    return
                while self._open:
                    pause = self._close if self._advance(self._open[-1], END) else self._offer
                    if pause(until):
                        return
                self._reached = ahead.next - 1
                if self._stopping is not None:
                    self._end(self._stopping)
                elif self._obeyed is None:
                    self.event = None  # the state is that of the end of the log
                return
            looks_at_all = until is not None or self._receivers.are_nested
            simple = not looks_at_all and self._pace.speed is None and self._weights is None
            if self._play_received() if simple else self._play_each(until):
                ahead.continue_at(self._reached + 1)
                return
            if not ahead.events and not self._open:
                self._reached = ahead.next - 1

    def _recall(self, fired: Event) -> bool:
        """Play the log's next event here, if it is the one that a handler has just fired again; whether it was."""
        event = self._ahead.first(self._receivers.wanted)
        if event is None or (event.engine, event.event, event.iteration) != (fired.engine, fired.type, fired.iteration):
            return False
        self._ahead.events.popleft()
        host, self.event, self._reached, self.bus.sequence.last = self.event, event, event.seq, event.seq
        received = self._receivers.table[event.engine].get(event.event)
        if received is not None:
            deliver(*received, event, event.seq)
        self.event = host
        self._recalled.append(event)
        return True

    def _play_received(self) -> bool:
        """Play those of the events that were read that have a receiver; true to end."""
        table, bus, sequence = self._receivers.table, self.bus, self.bus.sequence
        for event in self._ahead.events:
            received = table[event.engine].get(event.event)
            if received is None:
                continue
            self.event = event
            engine, dispatch = received  # a call with a star would cost 60 ns more
            self._reached = sequence.last = seq = event.seq
            deliver(engine, dispatch, event, seq)
            if bus.attention:
                self._refresh()
                if self._stopping is not None:
                    self._end(self._stopping)
                    return True
                self._ahead.continue_at(seq + 1)  # other events may have receivers from here on
                return False
        self._ahead.events.clear()
        return False

    def _play_each(self, until: Until | None) -> bool:
        """Play the events that were read with everything in between, such as those fired in others; true to pause."""
        receivers, bus, sequence = self._receivers, self.bus, self.bus.sequence
        if self._offer(until):
            return True
        while self._ahead.events:
            event = self._ahead.events[0]
            if self._open and (pause := self._approach(event, until)) is not None:
                if pause:
                    return True
                continue
            if self._stopping is not None and not self._open:
                self._end(self._stopping)
                return True
            if until is None and self._receivers is not receivers:
                self._ahead.continue_at(self._reached + 1)  # other events may have receivers from here on
                return False
            self._ahead.events.popleft()
            self._reached = event.seq
            received = self._receivers.table[event.engine].get(event.event)
            if received is None and until is None:
                continue
            self._pace.wait(event)
            self.event, sequence.last = event, event.seq
            if self._weights is not None and event.engine == self._main:
                self._weights.follow(event.iteration)
            if received is not None:
                if self._receivers.are_recalled or (self._receivers.are_nested and is_host(event.event)):
                    self._open.append(Open(event, *received))
                    continue
                deliver(*received, event, event.seq)
            if bus.attention:
                self._refresh()
                if until is None:
                    self._ahead.continue_at(event.seq + 1)
                    return False
            if until is not None and until(whole(event)):
                return True
        return False

    def _approach(self, event: LoggedEvent, until: Until | None) -> bool | None:
        """Call the innermost open event's handlers before this one; None if this is played next, else if to pause."""
        opened = self._open[-1]
        is_inside = opened.contains(event)
        if not self._advance(opened, opened.place_of(event) if is_inside else END):
            return self._offer(until)  # one that was played meanwhile may be this one
        return None if is_inside else self._close(until)

    def _offer(self, until: Until | None) -> bool:
        """Whether to pause after an event that was played when a handler fired it again."""
        while self._recalled:
            event = self._recalled.popleft()
            if until is not None and until(whole(event)):
                self.event = event
                return True
        return False

    def _close(self, until: Until | None) -> bool:
        """The innermost open event has ended: its handlers have been called; true to pause after it."""
        opened = self._open.pop()
        if self.bus.attention:
            self._refresh()
        return until is not None and bool(until(whole(opened.event)))

    def _advance(self, opened: Open, upto: Place) -> bool:
        """Call the handlers of an open event before this place; false if one has fired an event of the log again."""
        engine, dispatch, event = opened.engine, opened.dispatch, opened.event
        assert engine is not None
        assert dispatch is not None
        self.event = event
        if upto is END and not (self._receivers.are_recalled or opened.called):  # nothing was fired in it
            deliver(engine, dispatch, event, event.seq)
            return True
        engine.last_event_name = dispatch.event
        deliver_to(opened.advance(upto, self._recalled), engine, dispatch, event, event.seq)
        return not self._recalled

    def _refresh(self) -> None:
        """A safe point: deliver posts, note calls of `terminate()`, and find out which events have receivers."""
        for engine in self.engines.values():
            stop = engine.settle()
            if stop is not None:
                self.stops.append(stop)
                if self._obeys and engine.name == self._main:
                    self._stopping = stop
        self.bus.attention = False
        self._receivers = Receivers(self.engines.values())

    def _end(self, stop: Stop) -> None:
        """Fire what the run would have fired at its end."""
        self._stopping, self._obeyed = None, stop
        now = self.event.t if self.event is not None else 0
        ends: list[tuple[str, object]] = [(Events.TERMINATE.value, {"reason": stop.reason})]
        if not stop.skip_completed:
            ends.append((Events.COMPLETED.value, None))
        for value, payload in ends:
            self.event = LoggedEvent(
                -1, self._main, value, stop.epoch, stop.iteration, payload, seq=self._reached, t=now
            )
            received = self._receivers.table[self._main].get(value)
            if received is not None:
                deliver(*received, self.event, self._reached)
