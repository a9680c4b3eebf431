"""Plays a recorded run through handlers, as if it ran."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.events.compiled import Dispatch
from pulsetrain.engine.events.dispatch import Dispatcher, deliver, deliver_to
from pulsetrain.engine.events.names import Event, EventEnum, Events
from pulsetrain.engine.events.subscription import Order, Phase
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording.log.reader import EventLog
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.engine.recording.replay.delivery import END, STRUCTURE, Open, Place, is_custom, is_host, may_be_nested
from pulsetrain.engine.recording.replay.engine import ReplayBus, ReplayedEngine
from pulsetrain.engine.recording.replay.pace import Pace
from pulsetrain.engine.recording.replay.payloads import whole
from pulsetrain.engine.recording.replay.source import Ahead, Past, Source
from pulsetrain.engine.recording.replay.state import ReplayedState, Stop
from pulsetrain.engine.recording.replay.weights import NearestWeights

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Replay", "Stop"]

_STARTS = frozenset({Events.STARTED.value, Events.EPOCH_STARTED.value})


class Replay(ReplayedEngine):
    """The trainer's engine of a recorded run, replayed: handlers get the events that they would have got in the run.

    They attach as to the engine itself, and find its state as it was: epoch, iteration, output (its scalars), metrics,
    counters, learning rates. `engines` has the log's other engines, on the same bus. If a resumed run computed a part
    again, the later events are played. Sampled or thinned events are missing here, too, and from the counters.

    A log does not say in which handler an event was fired. A custom event that a replayed handler fires again is played
    at that moment, so handlers are called in the order of the run; one that none fires again, before the phase OBSERVE
    of the ITERATION_COMPLETED, EPOCH_COMPLETED or COMPLETED in which it was fired, or after another event. As a Trainer
    does, validations, the events of engines that they run, and POLICY_UPDATED are placed before the handlers of those
    three, METRICS_LOGGED before their phase OBSERVE, CHECKPOINT_SAVED before their phase PERSIST; rollouts, between two
    iterations.

    Args:
        path: a run folder, its folder `events`, or an open log.
        engine: the name of the engine to replay; by default "trainer", or the first in the log.
        events: enums of custom events, whose handlers then get typed payloads. Those of other custom events get plain
            values.
        speed: 1.0 is as fast as the run was, 2.0 twice as fast; by default as fast as possible.
        obey_terminate: end where a handler of this engine calls `terminate()`, with TERMINATE and COMPLETED.
        deliver_fired: deliver the events that handlers fire. Counters remain the log's.
        checkpoints: True, or a function that reads a checkpoint's folder; then `checkpoint_state()` returns the state
            of the last checkpoint up to this iteration, or of the first one if there is none.
        model: an nn.Module for handlers that need one; it gets the weights of that checkpoint.
        rank: whose log, if several processes recorded.
        warn_of_damage: log each damaged part that is found; they are in `log.damage`, too.
        clock: returns seconds, for `speed`.
        sleep: waits so many seconds, for `speed`.

    Raises:
        RecordingError: there is no log, its format is newer, or it has no such engine.
        ConfigurationError: the speed is not positive, or a model was given without checkpoints.

    >>> import tempfile
    >>> from pulsetrain.engine import Engine
    >>> from pulsetrain.handlers import EventRecorder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     engine = Engine(lambda engine, batch: {"loss": 1 / batch})
    ...     recorder = EventRecorder(folder).attach(engine)
    ...     state = engine.run([1, 2, 4])
    ...     replay = Replay(folder)
    ...     handle = replay.add_event_handler(Events.ITERATION_COMPLETED, lambda e: print(e.state.output["loss"]))
    ...     state = replay.run()
    1.0
    0.5
    0.25
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
        model: nn.Module | None = None,
        rank: int = 0,
        warn_of_damage: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if speed is not None and not speed > 0:
            raise ConfigurationError("needs a positive number; None is as fast as possible", "Replay", speed=speed)
        self.log = path if isinstance(path, EventLog) else EventLog(path, rank)
        self.obey_terminate, self.deliver_fired = obey_terminate, deliver_fired
        self.fired: list[Event] = []  # by replayed handlers; seq is that of the event they handled
        self.stops: list[Stop] = []
        self.event: LoggedEvent | None = None  # that is being played, or was played last
        self._reached = -1  # the last seq played
        self._reach: tuple[int, int] = (-1, -1)
        self._stopping: Stop | None = None  # to be obeyed at the next safe point
        self._obeyed: Stop | None = None  # where the replay ended
        self._pace = Pace(speed, clock, sleep)
        self._source = Source(self.log)
        self._ahead = Ahead(self._source)
        self.past = Past(self._source)
        names = self.log.engines
        name = engine if engine is not None else self.log.main_engine
        if engine is not None and engine not in names:
            raise RecordingError(
                f"the log has no such engine; there are {', '.join(names) or 'none'}", "Replay", engine=engine
            )
        known = [event for enum in events for event in enum]
        bus = ReplayBus()
        super().__init__(name, self, bus, self._source.types(name), known)
        self.engines: dict[str, ReplayedEngine] = {name: self}
        for other in names:
            if other != name:
                self.engines[other] = ReplayedEngine(other, self, bus, self._source.types(other), known)
        self._warns_of_damage = warn_of_damage
        self._reported = 0  # how many damaged parts of the log
        self._weights = NearestWeights.beside(self.log.folder, checkpoints, model)
        self._open: list[Open] = []  # events some of whose handlers wait until the events fired in them were played
        self._table: dict[str, dict[str, tuple[ReplayedEngine, Dispatch]]] = {}  # by engine: the events with a receiver
        self._wanted: dict[str, frozenset[str]] = {}
        self._nests = False  # there are receivers of events and of those fired in them
        self._recalls = False  # and some of those are custom
        self._recalled: deque[LoggedEvent] = deque()  # played when a handler fired them again; `until` waits for them

    @property
    def model(self) -> nn.Module:
        """The given model, with the nearest checkpoint's weights."""
        if self._weights is None or self._weights.model is None:
            self.__getattr__("model")  # raises
        self._weights.nearest(self.state.iteration)
        return self._weights.model

    @property
    def checkpoint_state(self) -> Callable[[], Mapping[str, Any]]:
        """A function that returns the nearest checkpoint's state."""
        weights = self._weights
        if weights is None:
            self.__getattr__("checkpoint_state")  # raises
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
        """The iteration of this engine's last event."""
        return self._source.last_iteration(self.name)

    def run(self, until: Callable[[LoggedEvent], object] | None = None) -> ReplayedState:  # type: ignore[override]
        """Play to the end, or through the first event for which `until` is true; call it again to continue.

        A warning names each damaged part of the log, whose events are missing; see `log.damage`.

        Raises:
            RuntimeError: called by a handler of this replay.
            Exception: a handler's own error, with a note that says where; run() then continues after that event.
        """
        if self._running:
            raise RuntimeError(f"Replay of {self.name!r}: run() was called from inside its own run")
        self._running = True
        self._pace.begin()
        try:
            self._play(until)
        except BaseException:
            self._open.clear()
            self._ahead.continue_at(self._reached + 1)
            raise
        finally:
            self._running = False
            if self._warns_of_damage:
                self._report_damage()
        return self.state

    def _report_damage(self) -> None:
        for each in self.log.damage[self._reported :]:
            get_logger("engine").warning("the log is damaged: the replay lacks these events", damage=str(each))
        self._reported = len(self.log.damage)

    def step(self) -> LoggedEvent | None:
        """Play one event, whether it has a receiver or not; returns it, or None at the end.

        The events fired by its handlers end before it does, so they come first.
        """
        played: list[LoggedEvent] = []

        def first(event: LoggedEvent) -> bool:
            played.append(event)
            return True

        self.run(until=first)
        return played[0] if played else None

    def seek(self, seq: int) -> ReplayedState:
        """Move in the log, forward or back: the event with this seq, or the first after it, is played next.

        Handlers are not called, and keep their own state; `state` is as it was after the event before.

        Raises:
            RecordingError: the log ends before.
            RuntimeError: called by a handler of this replay.
        """
        if self._running:
            raise RuntimeError(f"Replay of {self.name!r}: seek() was called from inside its own run")
        if not len(self._source) or seq > self._source.span(len(self._source) - 1)[1]:
            raise RecordingError(f"Replay.seek({seq}): the log ends before; it holds {len(self.log)} events")
        self._open.clear()
        self._stopping = self._obeyed = None
        self._ahead.continue_at(seq)
        self._recalled.clear()
        self._reached = seq - 1
        before = [self.past.last(name, None, seq - 1) for name in self.engines]
        self.event = max([event for event in before if event is not None], key=lambda event: event.seq, default=None)
        return self.state

    def reach(self) -> int:
        """The seq up to which the state is known: that of the last validation made in the present event."""
        event = self.event
        if event is None or self._nests or not is_host(event.event):
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
        if self.deliver_fired and dispatch.connected:
            with self.bus.sequence.observing() if event.observed else nullcontext():
                deliver(engine, dispatch, event, event.seq)
        if self._recalls and is_custom(event.type):
            self._recall(event)

    def _recall(self, fired: Event) -> None:
        """Play the log's next event here, if it is the one that a handler has just fired again."""
        event = self._ahead.first(self._wanted)
        if event is None or (event.engine, event.event, event.iteration) != (fired.engine, fired.type, fired.iteration):
            return
        self._ahead.events.popleft()
        host, self.event, self._reached, self._sequence.last = self.event, event, event.seq, event.seq
        received = self._table[event.engine].get(event.event)
        if received is not None:
            deliver(*received, event, event.seq)
        self.event = host
        self._recalled.append(event)

    def _play(self, until: Callable[[LoggedEvent], object] | None) -> None:
        self._ahead.reads_all = until is not None
        self._refresh()
        while self._obeyed is None:
            if self._ahead.first(self._wanted) is None:
                while self._open and self._advance(self._open[-1], END):
                    if self._close(until):
                        return
                self._reached = self._ahead.next - 1
                if self._stopping is not None:
                    self._end(self._stopping)
                elif self._obeyed is None:
                    self.event = None  # the state is that of the end of the log
                return
            simple = until is None and not self._nests and self._pace.speed is None and self._weights is None
            if self._play_received() if simple else self._play_each(until):
                self._ahead.continue_at(self._reached + 1)
                return
            if not self._ahead.events and not self._open:
                self._reached = self._ahead.next - 1

    def _play_received(self) -> bool:
        """Play those of the events that were read that have a receiver; true to end."""
        table, bus, sequence = self._table, self.bus, self._sequence
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

    def _play_each(self, until: Callable[[LoggedEvent], object] | None) -> bool:
        """Play the events that were read with everything in between, such as those fired in others; true to pause."""
        table, bus, sequence = self._table, self.bus, self._sequence
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
            if until is None and self._table is not table:
                self._ahead.continue_at(self._reached + 1)  # other events may have receivers from here on
                return False
            self._ahead.events.popleft()
            self._reached = event.seq
            received = self._table[event.engine].get(event.event)
            if received is None and until is None:
                continue
            self._pace.wait(event)
            self.event, sequence.last = event, event.seq
            if self._weights is not None and event.engine == self.name:
                self._weights.follow(event.iteration)
            if received is not None:
                if self._recalls or (self._nests and is_host(event.event)):
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

    def _approach(self, event: LoggedEvent, until: Callable[[LoggedEvent], object] | None) -> bool | None:
        """Call the innermost open event's handlers before this one; None if this is played next, else if to pause."""
        opened = self._open[-1]
        is_inside = opened.contains(event)
        if not self._advance(opened, opened.place_of(event) if is_inside else END):
            return self._offer(until)  # one that was played meanwhile may be this one
        return None if is_inside else self._close(until)

    def _offer(self, until: Callable[[LoggedEvent], object] | None) -> bool:
        """Whether to pause after an event that was played when a handler fired it again."""
        while self._recalled:
            event = self._recalled.popleft()
            if until is not None and until(whole(event)):
                return True
        return False

    def _close(self, until: Callable[[LoggedEvent], object] | None) -> bool:
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
        if upto is END and not (self._recalls or opened.called):  # nothing was fired in it
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
                if self.obey_terminate and engine is self:
                    self._stopping = stop
        self.bus.attention = False
        self._table = defaultdict(dict)  # of an event without an engine, none
        for name, engine in self.engines.items():
            self._table[name] = {value: (engine, dispatch) for value, dispatch in engine.dispatches().items()}
        received = [value for dispatches in self._table.values() for value in dispatches]
        several = sum(1 for dispatches in self._table.values() if dispatches) > 1
        self._recalls = len(received) > 1 and any(map(is_custom, received))
        self._nests = self._recalls or (any(map(is_host, received)) and (several or any(map(may_be_nested, received))))
        extra = STRUCTURE if self._nests else frozenset()
        self._wanted = {name: extra.union(self._table[name]) for name in self.engines}

    def _end(self, stop: Stop) -> None:
        """Fire what the run would have fired at its end."""
        self._stopping, self._obeyed = None, stop
        now = self.event.t if self.event is not None else 0
        ends: list[tuple[str, object]] = [(Events.TERMINATE.value, {"reason": stop.reason})]
        if not stop.skip_completed:
            ends.append((Events.COMPLETED.value, None))
        for value, payload in ends:
            self.event = LoggedEvent(
                -1, self.name, value, stop.epoch, stop.iteration, payload, seq=self._reached, t=now
            )
            if value in self._table[self.name]:
                deliver(*self._table[self.name][value], self.event, self._reached)
