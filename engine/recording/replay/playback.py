"""Plays a recorded run through handlers, as if it ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.events.names import Event, EventEnum
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording.log.reader import EventLog
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.engine.recording.replay.engine import ReplayedEngine
from pulsetrain.engine.recording.replay.pace import Pace
from pulsetrain.engine.recording.replay.player import Player
from pulsetrain.engine.recording.replay.source import Source
from pulsetrain.engine.recording.replay.state import ReplayedState, Stop
from pulsetrain.engine.recording.replay.weights import NearestWeights

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Replay", "Stop"]


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
    >>> from pulsetrain.engine import Engine, Events
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
        self.log: EventLog = path if isinstance(path, EventLog) else EventLog(path, rank)
        name = engine if engine is not None else self.log.main_engine
        names = self.log.engines
        if engine is not None and engine not in names:
            raise RecordingError(
                f"the log has no such engine; there are {', '.join(names) or 'none'}", "Replay", engine=engine
            )
        self._source = Source(self.log)
        self._pace = Pace(speed, clock, sleep)
        self._weights = NearestWeights.beside(self.log.folder, checkpoints, model)
        self._player = player = Player(
            self._source, name, self._pace, self._weights, obey_terminate=obey_terminate, deliver_fired=deliver_fired
        )
        known = [event for enum in events for event in enum]
        super().__init__(name, player, player.bus, self._source.types(name), known)
        self.engines: dict[str, ReplayedEngine] = player.engines
        self.engines[name] = self
        for other in names:
            if other != name:
                self.engines[other] = ReplayedEngine(other, player, player.bus, self._source.types(other), known)
        self._warns_of_damage = warn_of_damage
        self._reported = 0  # how many damaged parts of the log

    @property
    def event(self) -> LoggedEvent | None:
        """The event that is being played, or was played last; None before the first and after the last."""
        return self._player.event

    @property
    def fired(self) -> list[Event]:
        """What replayed handlers have fired; `seq` is that of the event that they handled."""
        return self._player.fired

    @property
    def stops(self) -> list[Stop]:
        """Where replayed handlers have called `terminate()`."""
        return self._player.stops

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
            self._player.play(until)
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
        self._player.seek(seq)
        return self.state
