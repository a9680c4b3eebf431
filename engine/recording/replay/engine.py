"""An engine of a recorded run: handlers attach to it as to the one that ran, and find its state as it was then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.dispatch import Plan
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import READ_ONLY, Event, Events, canonical
from pulsetrain.engine.events.state import State
from pulsetrain.engine.events.subscription import Subscription
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.engine.recording.replay.payloads import ReplayedOutput, plain

if TYPE_CHECKING:
    from pulsetrain.engine.recording.replay.playback import Replay

__all__ = ["RecordedOptimizer", "ReplayBus", "ReplayedEngine", "ReplayedState", "Stop"]

# what handlers ask an engine for and no log holds
NOT_LOGGED = {
    "model": "the weights: pass model= and checkpoints=True to get those of the nearest checkpoint",
    "checkpoint_state": "the state that a checkpoint takes: pass checkpoints=True to get that of the nearest",
    **dict.fromkeys(("train", "validate", "train_step", "train_epoch", "save_checkpoint"), "anything to compute with"),
}
BOUNDS = ("max_epochs", "max_iters", "epoch_length")

_ITERATED = Events.ITERATION_COMPLETED.value
_OUTPUTS = frozenset({Events.ITERATION_STARTED.value, _ITERATED})
_METRICS = frozenset(
    event.value
    for event in (
        *(Events.EPOCH_COMPLETED, Events.VALIDATION_COMPLETED),
        *(Events.ROLLOUT_COMPLETED, Events.POLICY_UPDATED),
    )
)
_RATES = frozenset({_ITERATED, Events.OPTIMIZER_STEP_COMPLETED.value})
_ENDS = frozenset({Events.STARTED.value, Events.TERMINATE.value, Events.EXCEPTION_RAISED.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where a replayed handler has called `terminate()`."""

    engine: str
    reason: str
    epoch: int
    iteration: int
    event: str  # that it was handling
    seq: int
    skip_completed: bool


class ReplayBus(EventBus):
    """A bus that says when its replay has to look up: somebody has subscribed, posted or asked for an end."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = False

    def connect_handler(self, *args: Any, **kwargs: Any) -> Subscription:
        self.attention = True
        return super().connect_handler(*args, **kwargs)


class ReplayedState(State):
    """What the engine knew where its replay stands, read from the log when it is asked for.

    Counters are the number of times that their events are in the log. `batch` is None. The bounds of the run are None
    where the log does not tell them, and can be set.
    """

    __slots__ = ("_metrics", "_name", "_replay", "_shown")

    def __init__(self, engine: ReplayedEngine, replay: Replay) -> None:
        self._name, self._replay = engine.name, replay
        self._metrics: dict[str, Any] = {}
        self._shown: Any = None  # the logged metrics that are among them
        super().__init__(engine)
        for name in (*BOUNDS, "update", "validation_round", "rollout_round", "save", "stop_reason"):
            del self.__dict__[name]  # __getattr__ answers

    def _event(self) -> LoggedEvent:
        event = self._replay.event
        if event is not None and event.engine == self._name:
            return event
        return self._last(None) or LoggedEvent()

    def _last(self, events: frozenset[str] | None) -> LoggedEvent | None:
        return self._replay.past.last(self._name, events, self._replay.reach())

    # The loop's own: no setters, but for what State's constructor does.

    @property
    def iteration(self) -> int:
        return self._event().iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        _refuse(value, 0, "iteration")

    @property
    def epoch(self) -> int:
        return self._event().epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        _refuse(value, 0, "epoch")

    @property  # type: ignore[override]  # ignite's annotation says int
    def output(self) -> ReplayedOutput | None:
        """The scalars of the last step's output by name; None while there was none."""
        event = self._replay.event
        if event is None or event.event not in _OUTPUTS or event.engine != self._name:
            event = self._last(_OUTPUTS)
        if event is None or event.output is None or event.event != _ITERATED:
            return None
        output = ReplayedOutput(event.output)
        for name, value in output.items():
            if type(value) is not float:
                output[name] = plain(value)
        return output

    @output.setter
    def output(self, value: Any) -> None:
        _refuse(value, None, "output")

    @property
    def metrics(self) -> dict[str, Any]:
        """The logged metrics, and what replayed handlers have put there."""
        event = self._event()
        logged = event.metrics if event.metrics is not None else getattr(self._last(_METRICS), "metrics", None)
        if logged is not self._shown:
            for name in self._shown or ():
                self._metrics.pop(name, None)
            self._metrics.update(plain(logged) if logged is not None else {})
            self._shown = logged
        return self._metrics

    @metrics.setter
    def metrics(self, value: dict[str, Any]) -> None:
        self._metrics, self._shown = value, None

    def __getattr__(self, name: str) -> Any:
        if name in BOUNDS:
            return self._replay.bounds(self._name).get(name)
        if name == "stop_reason":
            return self._stop_reason()
        engine = self._engine() if not name.startswith("_") and self._engine is not None else None
        counted = engine.counted_by(name) if isinstance(engine, ReplayedEngine) else ()
        if not counted:
            raise AttributeError(f"{type(self).__name__} of {self._name!r}: the log tells no {name!r}")
        reach = self._replay.reach()
        return max([self._replay.past.count(self._name, event, reach) for event in counted])

    def _stop_reason(self) -> str | None:
        """Why a replayed handler would have ended the run; else why it ended."""
        noted = next((stop.reason for stop in self._replay.stops if stop.engine == self._name), None)
        if noted is not None:
            return noted
        last = self._last(_ENDS)
        payload = getattr(last, "payload", None)
        if last is None or not isinstance(payload, dict) or last.event == Events.STARTED.value:
            return None
        if last.event == Events.TERMINATE.value:
            return str(payload["reason"])
        error = payload["error"]
        return f"{str(error['__type__']).rpartition('.')[2]}: {error.get('message', '')}"


class RecordedOptimizer:
    """Stands in for an optimizer: its parameter groups hold the learning rates of the log, and nothing else."""

    def __init__(self, state: ReplayedState) -> None:
        self._state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        event = self._state._event()
        logged: LoggedEvent | None = event if event.event in _RATES else self._state._last(_RATES)
        if logged is None:
            return []
        rates = logged.lr
        if logged.event == Events.OPTIMIZER_STEP_COMPLETED.value and isinstance(logged.payload, dict):
            rates = logged.payload["learning_rates"]
        return [{"lr": plain(rate)} for rate in rates or ()]


class ReplayedEngine(Engine):
    """Fires what an engine has fired, in the order of the log; it trains nothing.

    What its handlers fire is collected in `replay.fired`, not fired.

    Args:
        name: the engine's in the log.
        replay: that it is a part of; by default it is one itself.
        bus: shared with the log's other engines.
        logged: the events that the log holds of it.
        known: custom events that stand for their values.
    """

    state: ReplayedState
    _replay: Any  # the Replay, which is one of these

    def __init__(
        self, name: str, replay: Replay | None, bus: ReplayBus, logged: Iterable[str], known: Iterable[Any]
    ) -> None:
        self._replay = self if replay is None else replay
        self._counted: dict[str, tuple[str, ...]] = {}
        super().__init__(_no_step, name=name, bus=bus)
        self.state = ReplayedState(self, self._replay)
        self.optimizer = RecordedOptimizer(self.state)
        typed = {event.value: event for event in known}
        shipped = {event.value for event in Events}
        self.register_events(*typed.values(), *sorted(set(logged) - typed.keys() - shipped))

    # one flag for all engines of the bus: what any of them has been told is looked at behind the event
    @property
    def _attention(self) -> bool:
        return self._replayed_bus.attention

    @_attention.setter
    def _attention(self, value: bool) -> None:
        if value:
            self._replayed_bus.attention = True

    @property
    def _replayed_bus(self) -> ReplayBus:
        assert isinstance(self.bus, ReplayBus)
        return self.bus

    @property
    def run_number(self) -> int:
        """Runs begun: what `once` means by once."""
        replay = self._replay
        return int(replay.past.count(self.name, Events.STARTED.value, replay.reach()))

    @run_number.setter
    def run_number(self, value: int) -> None:
        _refuse(value, 0, "run_number")

    @property
    def should_terminate(self) -> bool | str:
        """As it was where the log says TERMINATE; else what a replayed handler has asked for in this event."""
        event = self._replay.event
        if event is not None and event.event == Events.TERMINATE.value and event.engine == self.name:
            return self._replay.completes(event) or "skip_completed"
        return self._terminate

    @should_terminate.setter
    def should_terminate(self, value: bool | str) -> None:
        self._terminate = value
        if value:
            self._attention = True

    @property
    def total_iterations(self) -> int | None:
        """How many batches the run was to take, where the log tells."""
        total = self._replay.bounds(self.name).get("total_iterations")
        return None if total is None else int(total)

    def __getattr__(self, name: str) -> Any:
        if name in NOT_LOGGED:
            raise RecordingError(
                f"Replay: {self.name!r} has no {name!r}: an event log does not hold {NOT_LOGGED[name]}; "
                "a handler that needs it can run in training alone"
            )
        raise AttributeError(f"{type(self).__name__} {self.__dict__.get('name')!r} has no attribute {name!r}")

    def counted_by(self, counter: str) -> tuple[str, ...]:
        """The events that advance the counter."""
        return self._counted.get(counter, ())

    def register_events(self, *event_names: Any, event_to_attr: dict[Any, str] | None = None) -> None:
        self._counters_changed(event_names, event_to_attr if isinstance(event_to_attr, dict) else {})
        super().register_events(*event_names, event_to_attr=event_to_attr)

    def _counters_changed(self, events: Iterable[Any], counters: dict[Any, str]) -> None:
        for event in events:
            counter = counters.get(event)
            if counter is not None and event not in READ_ONLY:
                known = self._counted.get(counter, ())
                self._counted[counter] = tuple(dict.fromkeys((*known, value_of(event))))

    def plans(self) -> dict[str, Plan]:
        """What somebody hears, by the events' values; of two that share one, the last registered."""
        found = {value_of(event): self._plan(event) for event in self.registered_events}
        return {value: plan for value, plan in found.items() if plan.live}

    def fire(self, event: Any, payload: Any = None) -> None:
        """Note in `replay.fired` that a handler has fired this; it is delivered only with deliver_fired=True.

        Raises:
            TypeError: the payload is not of the event's type.
            ValueError: the event is not allowed on this engine.
        """
        plan = self._plan(event)
        if type(payload) is not (plan.payload_type or type(None)):
            wanted = "no payload" if plan.payload_type is None else plan.payload_type.__name__
            raise TypeError(f"fire({event}, {payload!r}): this event carries {wanted}, not {type(payload).__name__}")
        now = self._replay.event or LoggedEvent()
        state = self.state
        fired = Event(now.seq, self.name, value_of(plan.event), state.epoch, state.iteration, payload, now.t)
        self._replay.note_fired(self, plan, fired)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise RecordingError(f"Replay: {self.name!r}.run(): its runs are in the log; run() the Replay itself")


def value_of(event: Any) -> str:
    """An event's value, which is its name in a log."""
    event = canonical(event)
    return event if isinstance(event, str) else str(event._value_)


def _no_step(engine: Engine, batch: Any) -> None:
    """A replay makes none."""


def _refuse(value: Any, first: Any, name: str) -> None:
    if value != first:
        raise RecordingError(f"Replay: {name}={value!r} cannot be set: it is what the log says")
