"""The state of an engine in a recorded run, read from the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.events.compiled import Dispatch
from pulsetrain.engine.events.dispatch import Dispatcher
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.state import State
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.engine.recording.replay.payloads import ReplayedOutput, plain
from pulsetrain.engine.recording.replay.source import Past

__all__ = ["METRIC_EVENTS", "Playback", "RecordedOptimizer", "ReplayedState", "Stop"]

BOUNDS = ("max_epochs", "max_iters", "epoch_length")

_ITERATED = Events.ITERATION_COMPLETED.value
_OUTPUTS = frozenset({Events.ITERATION_STARTED.value, _ITERATED})
_MEASURED = (Events.EPOCH_COMPLETED, Events.VALIDATION_COMPLETED, Events.ROLLOUT_COMPLETED, Events.POLICY_UPDATED)
METRIC_EVENTS = frozenset(event.value for event in _MEASURED)  # which are recorded with the metrics of the state
_RATES = frozenset({_ITERATED, Events.OPTIMIZER_STEP_COMPLETED.value})
_ENDS = frozenset({Events.STARTED.value, Events.TERMINATE.value, Events.EXCEPTION_RAISED.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where a replayed handler called `terminate()`."""

    engine: str
    reason: str
    epoch: int
    iteration: int
    event: str  # that it was handling
    seq: int
    skip_completed: bool


class Playback(Protocol):
    """A position in a log, as far as replayed engines and their states need it: `Player` is one."""

    event: LoggedEvent | None
    past: Past
    stops: list[Stop]

    def reach(self) -> int:
        """The seq up to which the state is known."""

    def bounds(self, engine: str) -> dict[str, Any]:
        """What the log says about the length of the engine's run."""

    def completes(self, terminated: LoggedEvent) -> bool:
        """Whether a terminated run fired COMPLETED."""

    def note_fired(self, engine: Dispatcher, dispatch: Dispatch, event: Event) -> None:
        """A handler has fired an event."""


class ReplayedState(State):
    """What the engine knew at the present position of its replay, read from the log on demand.

    A counter is the number of its events in the log so far. `batch` is None. The limits of the run are None unless the
    log has them, and can be set.
    """

    __slots__ = ("_counted", "_is_made", "_metrics", "_name", "_playback", "_shown")

    def __init__(self, name: str, playback: Playback, counted: Mapping[str, tuple[str, ...]]) -> None:
        self._name, self._playback, self._counted = name, playback, counted
        self._metrics: dict[str, Any] = {}
        self._shown: Any = None  # the logged metrics that are among them
        self._is_made = False
        super().__init__()
        self._is_made = True
        for attribute in (*BOUNDS, "update", "validation_round", "rollout_round", "save", "stop_reason"):
            del self.__dict__[attribute]  # __getattr__ answers

    def current(self) -> LoggedEvent:
        """The engine's event at the present position, or its last one before."""
        event = self._playback.event
        if event is not None and event.engine == self._name:
            return event
        return self.last(None) or LoggedEvent()

    def last(self, events: frozenset[str] | None) -> LoggedEvent | None:
        """The engine's last event, or the last of these, up to the present position."""
        return self._playback.past.last(self._name, events, self._playback.reach())

    # The loop's attributes: State's constructor sets them once, and nothing else may.

    @property
    def iteration(self) -> int:
        return self.current().iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._refuse("iteration", value)

    @property
    def epoch(self) -> int:
        return self.current().epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._refuse("epoch", value)

    @property  # type: ignore[override]  # ignite's annotation says int
    def output(self) -> ReplayedOutput | None:
        """The scalars of the last step's output by name; None before the first step."""
        event = self._playback.event
        if event is None or event.event not in _OUTPUTS or event.engine != self._name:
            event = self.last(_OUTPUTS)
        if event is None or event.output is None or event.event != _ITERATED:
            return None
        output = ReplayedOutput(event.output)
        for name, value in output.items():
            if type(value) is not float:
                output[name] = plain(value)
        return output

    @output.setter
    def output(self, value: object) -> None:
        self._refuse("output", value)

    @property
    def metrics(self) -> dict[str, Any]:
        """The logged metrics, and those that replayed handlers have set."""
        event = self.current()
        logged = event.metrics if event.metrics is not None else getattr(self.last(METRIC_EVENTS), "metrics", None)
        if logged is not self._shown:
            for name in self._shown or ():
                self._metrics.pop(name, None)
            self._metrics.update(plain(logged) if logged is not None else {})
            self._shown = logged
        return self._metrics

    @metrics.setter
    def metrics(self, value: dict[str, Any]) -> None:
        self._metrics, self._shown = value, None

    def _refuse(self, name: str, value: object) -> None:
        if self._is_made:
            raise RecordingError(f"Replay: {name}={value!r} cannot be set: its value comes from the log")

    def __getattr__(self, name: str) -> Any:  # counters of custom events, too
        if name in BOUNDS:
            return self._playback.bounds(self._name).get(name)
        if name == "stop_reason":
            return self._stop_reason()
        counted = () if name.startswith("_") else self._counted.get(name, ())
        if not counted:
            raise AttributeError(f"{type(self).__name__} of {self._name!r}: the log has no {name!r}")
        reach = self._playback.reach()
        return max([self._playback.past.count(self._name, event, reach) for event in counted])

    def _stop_reason(self) -> str | None:
        """Why a replayed handler would have ended the run; else why the run ended."""
        noted = next((stop.reason for stop in self._playback.stops if stop.engine == self._name), None)
        if noted is not None:
            return noted
        last = self.last(_ENDS)
        payload = getattr(last, "payload", None)
        if last is None or not isinstance(payload, dict) or last.event == Events.STARTED.value:
            return None
        if last.event == Events.TERMINATE.value:
            return str(payload["reason"])
        error = payload["error"]
        return f"{str(error['__type__']).rpartition('.')[2]}: {error.get('message', '')}"


class RecordedOptimizer:
    """Has parameter groups with the learning rates of the log, and nothing else of an optimizer."""

    def __init__(self, state: ReplayedState) -> None:
        self._state = state

    @property
    def param_groups(self) -> list[dict[str, float]]:
        event = self._state.current()
        logged = event if event.event in _RATES else self._state.last(_RATES)
        if logged is None:
            return []
        rates = logged.lr
        if logged.event == Events.OPTIMIZER_STEP_COMPLETED.value and isinstance(logged.payload, dict):
            rates = logged.payload["learning_rates"]
        return [{"lr": plain(rate)} for rate in rates or ()]
