"""Plays a recorded run through handlers, as if it ran."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.events.dispatch import Plan, annotate, emit_added
from pulsetrain.engine.events.names import Event, EventEnum, Events
from pulsetrain.engine.events.subscription import Phase
from pulsetrain.engine.recording.log.reader import EventLog
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.engine.recording.replay.delivery import (
    FIRST,
    LAST,
    STRUCTURE,
    Open,
    Place,
    deliver,
    deliver_part,
    is_host,
    may_be_nested,
)
from pulsetrain.engine.recording.replay.engine import ReplayBus, ReplayedEngine, ReplayedState, Stop
from pulsetrain.engine.recording.replay.payloads import whole
from pulsetrain.engine.recording.replay.source import Past, Source
from pulsetrain.engine.recording.replay.weights import NearestWeights

__all__ = ["Replay", "Stop"]

_STARTS = frozenset({Events.STARTED.value, Events.EPOCH_STARTED.value})


class Replay(ReplayedEngine):
    """The trainer's engine of a recorded run, replayed: its handlers hear what they would have heard, in that order.

    They attach as to the engine itself, and find its state as it was: epoch, iteration, output (its scalars), metrics,
    counters, learning rates. `engines` has the log's other engines, on the same bus. What a resumed run has computed
    again is played as it was in the end. Sampled or thinned events are missing here, too, and in counters of them.

    A log does not say in which handler an event was fired. Validations, the events of engines that they run, and
    POLICY_UPDATED are taken to come before the handlers of ITERATION_COMPLETED, EPOCH_COMPLETED or COMPLETED that they
    were fired in, as a Trainer makes them; METRICS_LOGGED before its phase OBSERVE, CHECKPOINT_SAVED before its phase
    PERSIST. Rollouts come between two iterations.

    Args:
        path: a run folder, its folder `events`, or an open log.
        engine: the one that this stands for; by default "trainer", or the first in the log.
        events: enums of custom events: handlers get their payload types. Others go by their names, with plain payloads.
        speed: 1.0 is as fast as the run was, 2.0 twice that; by default as fast as it goes.
        obey_terminate: end where a handler of this engine calls `terminate()`, with TERMINATE and COMPLETED.
        deliver_fired: deliver what handlers fire to those that hear it. Counters remain the log's.
        checkpoints: True, or what reads a checkpoint's folder; then `checkpoint_state()` gives the state of the nearest
            one, made at this iteration or before it (where there is none, the first).
        model: an nn.Module for handlers that need one, with the weights of that checkpoint.
        rank: whose log, where several processes have recorded.
        clock: seconds, for `speed`.
        sleep: waits so many seconds, for `speed`.

    Raises:
        RecordingError: there is no log, it is of a newer format, or it has no such engine.
        ConfigurationError: the speed is not positive; a model without checkpoints.
    """

    def __init__(
        self,
        path: str | Path | EventLog,
        *,
        engine: str | None = None,
        events: Iterable[type[EventEnum]] = (),
        speed: float | None = None,
        obey_terminate: bool = False,
        deliver_fired: bool = False,
        checkpoints: Callable[[Path], Mapping[str, Any]] | bool | None = None,
        model: Any = None,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if speed is not None and not speed > 0:
            raise ConfigurationError(f"Replay(speed={speed!r}): needs a positive number; None is as fast as it goes")
        self.log = path if isinstance(path, EventLog) else EventLog(path, rank)
        self.speed, self.obey_terminate, self.deliver_fired = speed, obey_terminate, deliver_fired
        self.fired: list[Event] = []  # by replayed handlers; seq is that of the event they handled
        self.stops: list[Stop] = []
        self.event: LoggedEvent | None = None  # the one that is played, or was played last
        self._reached = -1  # the last seq played
        self._next = 0  # the first seq that is not played
        self._reach: tuple[int, int] = (-1, -1)
        self._stopping: Stop | None = None  # that is obeyed
        self._obeyed: Stop | None = None  # the end that was come to
        self._began: tuple[float, int] | None = None  # when this run() played its first event, and that event's t
        self._clock, self._sleep = clock, sleep
        self._source = Source(self.log)
        self.past = Past(self._source)
        names = self.log.engines
        name = engine if engine is not None else self.log.main_engine
        if engine is not None and engine not in names:
            raise RecordingError(
                f"Replay(engine={engine!r}): the log has no such engine; there are {', '.join(names) or 'none'}"
            )
        known = [event for enum in events for event in enum]
        bus = ReplayBus()
        super().__init__(name, None, bus, self._source.types(name), known)
        self.engines: dict[str, ReplayedEngine] = {name: self}
        for other in names:
            if other != name:
                self.engines[other] = ReplayedEngine(other, self, bus, self._source.types(other), known)
        self._weights = NearestWeights.beside(self.log.folder, checkpoints, model)
        self._open: list[Open] = []  # events some of whose handlers wait for those that were fired in them
        self._table: dict[str, dict[str, tuple[ReplayedEngine, Plan]]] = {}  # what is heard
        self._wanted: dict[str, frozenset[str]] = {}
        self._nests = False  # somebody hears events and those that are fired in them

    @property
    def model(self) -> Any:
        """The model that was given, with the nearest checkpoint's weights."""
        if self._weights is None or self._weights.model is None:
            return self.__getattr__("model")
        self._weights.nearest(self.state.iteration)
        return self._weights.model

    @property
    def checkpoint_state(self) -> Callable[[], Mapping[str, Any]]:
        """Gives the nearest checkpoint's state."""
        weights = self._weights
        if weights is None:
            return self.__getattr__("checkpoint_state")  # type: ignore[no-any-return]  # it raises
        return lambda: weights.nearest(self.state.iteration)

    @property
    def evaluator(self) -> ReplayedEngine:
        """The engine that ran the validations."""
        found = self.engines.get("evaluator", self.engines.get(f"{self.name}.evaluator"))
        if found is None:
            raise AttributeError(f"Replay of {self.name!r}: the log has no evaluator")
        return found

    @property
    def last_iteration(self) -> int:
        """How far this engine came."""
        return self._source.last_iteration(self.name)

    def run(self, until: Callable[[LoggedEvent], Any] | None = None) -> ReplayedState:  # type: ignore[override]
        """Play on, to the end or through the first event for which `until` is true; again, to go on behind it.

        Raises:
            RuntimeError: called by a handler of this replay.
            Exception: what a handler raises, with a note of where; run() goes on behind that event.
        """
        if self._running:
            raise RuntimeError(f"Replay of {self.name!r}: run() was called from inside its own run")
        self._running = True
        self._began = None
        try:
            self._play(until)
        except BaseException:
            self._open.clear()
            self._next = self._reached + 1
            raise
        finally:
            self._running = False
        return self.state

    def step(self) -> LoggedEvent | None:
        """Play one event, whether somebody hears it or not; returns it, or None at the end.

        An event is over behind those that were fired in it: these come first.
        """
        played: list[LoggedEvent] = []

        def first(event: LoggedEvent) -> bool:
            played.append(event)
            return True

        self.run(until=first)
        return played[0] if played else None

    def seek(self, seq: int) -> ReplayedState:
        """Go to a place in the log, forward or back: the event with this seq, or the next there is, is played next.

        Handlers are not called, and keep what they know; the state is as it was behind the event before.

        Raises:
            RecordingError: the log does not go that far.
            RuntimeError: called by a handler of this replay.
        """
        if self._running:
            raise RuntimeError(f"Replay of {self.name!r}: seek() was called from inside its own run")
        if not len(self._source) or seq > self._source.span(len(self._source) - 1)[1]:
            raise RecordingError(f"Replay.seek({seq}): the log ends before; it holds {len(self.log)} events")
        self._open.clear()
        self._stopping = self._obeyed = None
        self._next, self._reached = seq, seq - 1
        before = [self.past.last(name, None, seq - 1) for name in self.engines]
        self.event = max([event for event in before if event is not None], key=lambda event: event.seq, default=None)
        return self.state

    def reach(self) -> int:
        """The seq up to which the state is known: behind validations made in the event that is being played."""
        event = self.event
        if event is None or self._nests or not is_host(event.event):
            return self._reached
        if self._reach[0] != event.seq:
            end, opened = event.seq, Open(event)
            for following in self.past.following(event.seq):
                if not opened.takes(following) or opened.place_of(following) > (Phase.ACT, 0.0):
                    break
                end = following.seq
            self._reach = event.seq, end
        return max(self._reached, self._reach[1])

    def bounds(self, engine: str) -> dict[str, Any]:
        """What the log tells of the bounds of the engine's run."""
        last = self.past.last(engine, _STARTS, self._reached)
        payload = whole(last).payload if last is not None else None
        return payload if isinstance(payload, dict) else {}

    def completes(self, terminated: LoggedEvent) -> bool:
        """Whether the run that was ended here came to its COMPLETED."""
        if self._obeyed is not None:
            return not self._obeyed.skip_completed
        for event in self.past.following(terminated.seq):
            if event.engine == terminated.engine and event.event in (Events.COMPLETED.value, Events.STARTED.value):
                return bool(event.event == Events.COMPLETED.value)
        return False

    def note_fired(self, engine: ReplayedEngine, plan: Plan, event: Event) -> None:
        """A handler has fired an event."""
        self.fired.append(event)
        if self.deliver_fired and plan.live:
            deliver(engine, plan, self.event or LoggedEvent(), event)

    def _play(self, until: Callable[[LoggedEvent], Any] | None) -> None:
        source = self._source
        self._look_up()
        while self._obeyed is None:
            index = source.index_of(self._next)
            if index == len(source):
                if not self._close(None, until) and self._stopping is not None:
                    self._end(self._stopping)
                elif self._obeyed is None and not self._open:
                    self.event = None  # the state is that of the log's end, heard or not
                return
            first, last = source.span(index)
            events = source.select(index, self._wanted) if until is None else source.events(index)
            if self._next > first:
                events = [event for event in events if event.seq >= self._next]
            self._next = last + 1
            plainly = until is None and not self._nests and self.speed is None and self._weights is None
            if self._play_heard(events) if plainly else self._play_each(events, until):
                return
            if self._next > last and not self._open:
                self._reached = last

    def _play_heard(self, events: Sequence[LoggedEvent]) -> bool:
        """Play those events that are heard; false where it can go on."""
        table, bus, sequence = self._table, self._replayed_bus, self._sequence
        call: Any = None  # the handler that runs, and of what
        engine: ReplayedEngine
        plan: Plan
        try:
            for event in events:
                heard = table[event.engine].get(event.event)
                if heard is None:
                    continue
                engine, plan = heard
                self.event = event
                self._reached = sequence.last = event.seq
                if plan.plain and not bus.attention:
                    engine.last_event_name = plan.event
                    calls = plan.calls
                    for call in calls:
                        call(engine)
                    call = None
                    if plan.calls is not calls:
                        emit_added(engine, plan, calls, None, event.seq)
                else:
                    deliver(engine, plan, event)
                if bus.attention:
                    self._look_up()
                    if self._stopping is not None:
                        self._end(self._stopping)
                        return True
                    self._next = event.seq + 1  # others may be heard from here on
                    return False
        except BaseException as error:
            if call is not None:  # `deliver` has said it of others
                annotate(error, engine, plan, next((s for s in calls.subscriptions if s.call is call), None))
            raise
        return False

    def _play_each(self, events: Sequence[LoggedEvent], until: Callable[[LoggedEvent], Any] | None) -> bool:
        """Play events with all that may come between: those fired in others, waiting, pausing; false to go on."""
        table, bus, sequence = self._table, self._replayed_bus, self._sequence
        for event in events:
            if self._close(event, until):
                self._next = event.seq
                return True
            if self._stopping is not None and not self._open:
                self._end(self._stopping)
                return True
            if until is None and self._table is not table:
                self._next = event.seq  # others may be heard from here on
                return False
            if self._open:
                self._go_on_in(self._open[-1], self._open[-1].place_of(event))
            self._reached = event.seq
            heard = self._table[event.engine].get(event.event)
            if heard is None and until is None:
                continue
            self._wait(event)
            self.event, sequence.last = event, event.seq
            if self._weights is not None and event.engine == self.name:
                self._weights.follow(event.iteration)
            if heard is not None:
                engine, plan = heard
                if self._nests and is_host(event.event):
                    self._open.append(Open(event, engine, plan))
                    continue
                deliver(engine, plan, event)
            if bus.attention:
                self._look_up()
                if until is None:
                    self._next = event.seq + 1
                    return False
            if until is not None and until(whole(event)):
                self._next = event.seq + 1
                return True
        return False

    def _close(self, event: LoggedEvent | None, until: Callable[[LoggedEvent], Any] | None) -> bool:
        """Call what is left of the handlers of events that the next one was not fired in; true to pause behind one."""
        while self._open and (event is None or not self._open[-1].takes(event)):
            opened = self._open[-1]
            self._go_on_in(opened, LAST)
            self._open.pop()
            if self._replayed_bus.attention:
                self._look_up()
            if until is not None and until(whole(opened.event)):
                return True
        return False

    def _go_on_in(self, opened: Open, upto: Place) -> None:
        self.event = opened.event
        if opened.done is FIRST and upto is LAST:  # nothing was fired in it
            deliver(opened.engine, opened.plan, opened.event)  # type: ignore[arg-type]  # it is heard, so it has both
        else:
            deliver_part(opened, upto)

    def _look_up(self) -> None:
        """A safe point: note what handlers have asked for, and find out anew who hears what."""
        self._replayed_bus.attention = False
        for engine in self.engines.values():
            engine._deliver_posts()
            if engine._terminate:
                self._note_stop(engine)
            engine._terminate = engine._terminate_epoch = engine._interrupt = False
        self._replayed_bus.attention = False
        self._table = defaultdict(dict)
        for name, engine in self.engines.items():
            self._table[name] = {value: (engine, plan) for value, plan in engine.plans().items()}
        heard = [value for plans in self._table.values() for value in plans]
        several = sum(1 for plans in self._table.values() if plans) > 1
        self._nests = any(map(is_host, heard)) and (several or any(map(may_be_nested, heard)))
        extra = STRUCTURE if self._nests else frozenset()
        self._wanted = {name: extra.union(self._table[name]) for name in self.engines}

    def _note_stop(self, engine: ReplayedEngine) -> None:
        event = self.event or LoggedEvent()
        stop = Stop(
            engine=engine.name,
            reason=engine._termination_reason or "should_terminate was set",
            epoch=engine.state.epoch,
            iteration=engine.state.iteration,
            event=event.event,
            seq=event.seq,
            skip_completed=engine._terminate == "skip_completed",
        )
        self.stops.append(stop)
        if self.obey_terminate and engine is self:
            self._stopping = stop

    def _end(self, stop: Stop) -> None:
        """What the run would have fired at its end."""
        self._stopping, self._obeyed = None, stop
        now = self.event.t if self.event is not None else 0
        ends: list[tuple[str, Any]] = [(Events.TERMINATE.value, {"reason": stop.reason})]
        if not stop.skip_completed:
            ends.append((Events.COMPLETED.value, None))
        for value, payload in ends:
            self.event = LoggedEvent(
                -1, self.name, value, stop.epoch, stop.iteration, payload, seq=self._reached, t=now
            )
            if value in self._table[self.name]:
                deliver(*self._table[self.name][value], self.event)

    def _wait(self, event: LoggedEvent) -> None:
        """Until it is as long since this run() began as it was then."""
        if self.speed is None:
            return
        now = self._clock()
        if self._began is None:
            self._began = now, event.t
        due = self._began[0] + (event.t - self._began[1]) / 1e9 / self.speed
        if due > now:
            self._sleep(due - now)
