"""An engine of a recorded run: handlers attach to it as to the one that ran, and find its state as it was then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.compiled import Dispatch
from pulsetrain.engine.events.dispatch import check_payload
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import READ_ONLY, Event, EventEnum, EventLike, Events, identify, value_of
from pulsetrain.engine.events.subscription import Subscription
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.engine.recording.replay.payloads import payload_of
from pulsetrain.engine.recording.replay.state import Playback, RecordedOptimizer, ReplayedState, Stop

__all__ = ["ReplayBus", "ReplayedEngine"]

# what handlers ask an engine for and no log holds
NOT_LOGGED = {
    "model": "the weights: pass model= and checkpoints=True to get those of the nearest checkpoint",
    "checkpoint_state": "the state that a checkpoint holds: pass checkpoints=True to get that of the nearest",
    **dict.fromkeys(("train", "validate", "train_step", "train_epoch", "save_checkpoint"), "anything to compute with"),
}


class ReplayBus(EventBus):
    """A bus that reports to its replay when a handler has subscribed, posted, or called `terminate()`."""

    attention: bool

    def __init__(self) -> None:
        super().__init__()
        self.attention = False

    def connect_handler(self, *args: Any, **kwargs: Any) -> Subscription:  # all of them are passed on
        self.attention = True
        return super().connect_handler(*args, **kwargs)


class ReplayedEngine(Engine):
    """Fires what an engine fired, in the order of the log; it trains nothing.

    Events that its handlers fire are collected in `replay.fired`.

    Args:
        name: the engine's name in the log.
        playback: the position in the log.
        bus: shared with the log's other engines.
        logged: the values of the events that the log holds of it.
        known: custom events, to be found by their values.
    """

    state: ReplayedState
    bus: ReplayBus

    def __init__(
        self, name: str, playback: Playback, bus: ReplayBus, logged: Iterable[str], known: Iterable[EventEnum]
    ) -> None:
        self._playback = playback
        self._counted: dict[str, tuple[str, ...]] = {}  # the events that advance a counter
        super().__init__(_no_step, name=name, bus=bus)
        self.state = ReplayedState(name, playback, self._counted)
        self.optimizer: RecordedOptimizer = RecordedOptimizer(self.state)
        typed = {event.value: event for event in known}
        shipped = {event.value for event in Events}
        self.register_events(*typed.values(), *sorted(set(logged) - typed.keys() - shipped))

    # one flag for all engines of the bus: the replay looks at it after each event
    @property
    def _attention(self) -> bool:
        return self.bus.attention

    @_attention.setter
    def _attention(self, value: bool) -> None:
        if value:
            self.bus.attention = True

    @property
    def run_number(self) -> int:
        """Runs started: `once` means once in each."""
        playback = self._playback
        return int(playback.past.count(self.name, Events.STARTED.value, playback.reach()))

    @run_number.setter
    def run_number(self, value: int) -> None:
        if value:  # Engine's constructor sets it to 0
            raise RecordingError(f"Replay: run_number={value!r} cannot be set: its value comes from the log")

    @property
    def should_terminate(self) -> bool | str:
        """As it was if this is TERMINATE in the log; else what a replayed handler has set during this event."""
        event = self._playback.event
        if event is not None and event.event == Events.TERMINATE.value and event.engine == self.name:
            return self._playback.completes(event) or "skip_completed"
        return self._terminate

    @should_terminate.setter
    def should_terminate(self, value: bool | str) -> None:
        self._terminate = value
        self._attention = self._attention or bool(value)

    @property
    def total_iterations(self) -> int | None:
        """How many batches the run was to take, if the log has it."""
        total = self._playback.bounds(self.name).get("total_iterations")
        return None if total is None else int(total)

    def __getattr__(self, name: str) -> NoReturn:
        if name in NOT_LOGGED:
            raise RecordingError(
                f"Replay: {self.name!r} has no {name!r}: an event log does not hold {NOT_LOGGED[name]}; "
                "a handler that needs it can run in training alone"
            )
        raise AttributeError(f"{type(self).__name__} {self.__dict__.get('name')!r} has no attribute {name!r}")

    def register_events(self, *event_names: EventLike, event_to_attr: Mapping[Any, str] | None = None) -> None:
        counters = event_to_attr if isinstance(event_to_attr, dict) else {}
        for event in event_names:  # first, since the state answers from it
            counter = counters.get(event)
            if counter is not None and event not in READ_ONLY:
                value = value_of(identify(event)[1])
                self._counted[counter] = tuple(dict.fromkeys((*self._counted.get(counter, ()), value)))
        super().register_events(*event_names, event_to_attr=event_to_attr)

    def dispatches(self) -> dict[str, Dispatch]:
        """The events with a receiver, by their values; of two that share a value, the last registered."""
        found = {value_of(event): self.dispatch(event) for event in self.registered_events}
        return {value: dispatch for value, dispatch in found.items() if dispatch.connected}

    def fire(self, event: EventLike, payload: object = None, *, observed: bool = False) -> None:
        """Note in `replay.fired` that a handler has fired this; only with deliver_fired=True is it delivered.

        Raises:
            TypeError: the payload is not of the event's type.
            ValueError: the event is not registered on this engine.
        """
        dispatch = self.dispatch(event)
        check_payload("fire", dispatch.event, payload)
        self._note(dispatch, payload, observed)

    def fire_event(self, event_name: EventLike) -> None:
        """Ignite's form of `fire`, without a payload: noted in the same way."""
        self._require_registered(event_name)
        self._note(self.dispatch(event_name), None, observed=False)

    def _note(self, dispatch: Dispatch, payload: object, observed: bool) -> None:
        now = self._playback.event
        observed = observed or self._sequence.observed or (now is not None and now.ord < 0)
        now, state = now or LoggedEvent(), self.state
        value = value_of(dispatch.event)
        fired = Event(now.seq, self.name, value, state.epoch, state.iteration, payload, now.t, observed)
        self._playback.note_fired(self, dispatch, fired)

    def new_event(self, dispatch: Dispatch, payload: LoggedEvent | Event, seq: int) -> Event:
        """The record of a logged event, or of one that a handler has fired, which is given as its record."""
        if isinstance(payload, Event):
            return payload
        logged = payload
        return Event(
            seq,
            logged.engine,
            logged.event,
            logged.epoch,
            logged.iteration,
            payload_of(dispatch.event, logged),
            logged.t,
            logged.ord < 0,
        )

    def settle(self) -> Stop | None:
        """Deliver what was posted; returns where a handler called `terminate()`, if one did since the last time."""
        self._deliver_posts()
        stop = None
        if self._terminate:
            event = self._playback.event or LoggedEvent()
            stop = Stop(
                engine=self.name,
                reason=self._termination_reason or "should_terminate was set",
                epoch=self.state.epoch,
                iteration=self.state.iteration,
                event=event.event,
                seq=event.seq,
                skip_completed=self._terminate == "skip_completed",
            )
        self._terminate = self._terminate_epoch = self._interrupt = False
        return stop

    def run(self, *args: object, **kwargs: object) -> NoReturn:  # a Replay's run() has its own signature
        raise RecordingError(f"Replay: {self.name!r}.run(): its runs are in the log; run() the Replay itself")


def _no_step(engine: Engine, batch: object) -> None:
    """A replay trains nothing."""
