"""Events, their filters and the record that handlers get.

An event's key is (enum, name): pytorch-ignite's own `Events` members are the same events as ours, while another
enum's `STARTED` never collides. A filter is a frozen value that can say when it is next due.
"""

from __future__ import annotations

import inspect
import itertools
import numbers
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from ignite.engine.events import CallableEventWithFilter as IgniteEvent
from ignite.engine.events import EventEnum as IgniteEventEnum
from ignite.engine.events import Events as IgniteEvents
from ignite.engine.events import EventsList as IgniteEventsList

from pulsetrain.engine.events import payloads

__all__ = ["COUNTERS", "Event", "EventEnum", "EventFilter", "Events", "EventsList", "FilteredEvent", "event_key"]

NEVER = 1 << 62  # a counter value that no run reaches

_serial = itertools.count()


class Event(msgspec.Struct):
    """What happened: the record given to handlers that ask for `event`, and the wire format of the recorder."""

    seq: int  # place in the bus's one total order
    engine: str  # name of the engine that fired it
    type: str  # the event's value, such as "iteration_completed"
    epoch: int
    iteration: int
    payload: Any
    time_ns: int  # host wall clock, nanoseconds since 1970


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which values of an event's counter are due: `every`, `before` and `after` combine, `once` stands alone.

    The semantics are pytorch-ignite's: bounds are exclusive, and with a bound `every` is anchored behind `after`.
    """

    every: int = 1
    once: tuple[int, ...] = ()
    before: int = NEVER
    after: int | None = None

    def __call__(self, engine: object, value: int) -> bool:
        """Whether the counter value is due."""
        if self.once:
            return value in self.once
        if self.after is None:
            return value % self.every == 0
        return self.after < value < self.before and (value - self.after - 1) % self.every == 0

    def __str__(self) -> str:
        if self.once:
            return f"once={self.once[0] if len(self.once) == 1 else list(self.once)}"
        parts = [f"every={self.every}"] if self.every != 1 else []
        parts += [f"before={self.before}"] if self.before != NEVER else []
        parts += [f"after={self.after}"] if self.after else []
        return ", ".join(parts) or "after=0"

    def next_due(self, value: int) -> int:
        """The smallest due value above `value`, or NEVER."""
        if self.once:
            index = bisect_right(self.once, value)
            return self.once[index] if index < len(self.once) else NEVER
        if self.after is None:
            return (value // self.every + 1) * self.every
        start = max(value, self.after) + 1
        due = start + (self.after + 1 - start) % self.every
        return due if due < self.before else NEVER


def _build_filter(
    event: object,
    event_filter: Callable[..., bool] | None,
    every: int | None,
    once: int | Sequence[int] | None,
    before: int | None,
    after: int | None,
) -> EventFilter | Callable[..., bool] | None:
    windowed = every is not None or before is not None or after is not None
    if (event_filter is not None) + (once is not None) + windowed != 1:
        raise ValueError(
            f"{event}(...): Only one of the input arguments should be specified, except before, after and every, "
            "which combine; pass event_filter, or once, or those"
        )
    if event_filter is not None:
        if not callable(event_filter):
            raise TypeError(f"{event}({event_filter=!r}): Argument event_filter should be a callable(engine, value)")
        try:
            inspect.signature(event_filter).bind(None, 0)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{event}(event_filter={event_filter!r}): does not fit, "
                f"but will be called with (engine, value): {error}"
            ) from None
        return event_filter
    if once is not None:
        values = (once,) if isinstance(once, int) else once
        if (
            isinstance(values, str)
            or not isinstance(values, Sequence)
            or not values
            or not all(isinstance(value, int) and value > 0 for value in values)
        ):
            raise ValueError(
                f"{event}(once=...): Argument once should either be a positive integer or a list of positive integers, "
                f"got {once}"
            )
        return EventFilter(once=tuple(sorted(set(values))))
    if every is not None and not (isinstance(every, numbers.Integral) and every > 0):
        raise ValueError(f"{event}(every={every!r}): Argument every should be integer and greater than zero")
    for name, bound in (("before", before), ("after", after)):
        if bound is not None and not (isinstance(bound, numbers.Integral) and bound >= 0):
            raise ValueError(
                f"{event}({name}={bound!r}): Argument {name} should be integer and greater or equal to zero"
            )
    if before is None and after is None:
        assert every is not None
        return None if every == 1 else EventFilter(every=int(every))
    return EventFilter(every=every or 1, before=NEVER if before is None else before, after=after or 0)


class _Filterable(IgniteEvent):
    """What members and filtered events share: filtering by call, joining by `|`, equality by key."""

    key: str
    payload_type: type | None

    @property
    def member(self) -> EventEnum:
        raise NotImplementedError  # each of the two subclasses answers

    def __call__(
        self,
        event_filter: Callable[..., bool] | None = None,
        every: int | None = None,
        once: int | Sequence[int] | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> FilteredEvent:
        """The same event, heard only when its counter is due.

        Args:
            event_filter: called with the engine and the counter's value, says whether it is due.
            every: due at each n-th value: 3 -> 3, 6, 9; with a bound, anchored behind `after` (3, after=4 -> 5, 8).
            once: due at this value, or at each of these, once in a run.
            before: due below this value only.
            after: due above this value only.

        Raises:
            ValueError: no filter or two that do not combine, or a value out of range.
            TypeError: event_filter is no callable.
        """
        return FilteredEvent(self.member, _build_filter(self, event_filter, every, once, before, after))

    def __or__(self, other: object) -> EventsList:
        return EventsList() | self | other

    def __eq__(self, other: object) -> bool:
        if isinstance(other, IgniteEvent):
            return self.key == event_key(other)
        return isinstance(other, str) and self._name_ == other

    def __hash__(self) -> int:
        return hash(self._name_)  # equal to what ignite's own members hash to


class EventEnum(_Filterable, IgniteEventEnum):
    """Base of enums of events: a member is a value, or a value and the type of its payload.

    Example:
        class RolloutEvents(EventEnum):
            ROLLOUT_STARTED = "rollout_started"
            REWARD_MEASURED = "reward_measured", RewardMeasured
    """

    def __new__(cls, value: str, payload_type: type | None = None) -> EventEnum:
        """A member; the enum machinery calls this."""
        if not isinstance(value, str):
            raise TypeError(f"{cls.__name__}: an event's value needs to be a string, not {value!r}")
        if payload_type is not None and not isinstance(payload_type, type):
            raise TypeError(f"{cls.__name__}.{value}: the payload needs to be a type, not {payload_type!r}")
        member = IgniteEvent.__new__(cls)
        member._value_ = value
        return member

    def __init__(self, value: str, payload_type: type | None = None) -> None:
        for other in type(self):  # the machinery would make the second an alias that has lost its payload
            if other._value_ == value and other.payload_type is not payload_type:
                raise TypeError(
                    f"{type(self).__name__}.{self._name_}: the value {value!r} is {other}'s, whose payload differs; "
                    "give each event its own value"
                )
        self.filter = None
        self.payload_type = payload_type
        # unique for each member of each enum, also of two enums with one name; strings hash fastest
        self.key = f"{type(self).__qualname__}.{self._name_}#{next(_serial)}"

    @property
    def member(self) -> EventEnum:
        return self

    # Enum's own __eq__ and __hash__ come before _Filterable's unless named here
    __eq__ = _Filterable.__eq__
    __hash__ = _Filterable.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self._name_}"

    __str__ = __repr__


class FilteredEvent(_Filterable):
    """An event with a filter: what `Events.ITERATION_COMPLETED(every=100)` returns."""

    def __init__(self, member: EventEnum, event_filter: EventFilter | Callable[..., bool] | None) -> None:
        super().__init__(member._value_, event_filter, member._name_)
        self._member = member
        self.key = member.key
        self.payload_type = member.payload_type

    @property
    def member(self) -> EventEnum:
        return self._member

    def __reduce__(self) -> tuple[Any, ...]:
        return FilteredEvent, (self._member, self.filter)  # the key is this process's own

    def __repr__(self) -> str:
        if self.filter is None:
            return repr(self._member)
        return f"{self._member!r}({self.filter if isinstance(self.filter, EventFilter) else f'filter={self.filter}'})"


class EventsList(IgniteEventsList):
    """Several events joined by `|`; joining returns a new list and changes neither side."""

    def __or__(self, other: object) -> EventsList:
        joined = EventsList()
        joined._events = [*self._events]
        for event in other if isinstance(other, IgniteEventsList) else (other,):
            joined._append(event)  # type: ignore[arg-type]  # it refuses what is no event
        return joined

    def __iter__(self) -> Iterator[Any]:
        return iter(self._events)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self._events)) or "EventsList()"


class Events(EventEnum):
    """The events of a run, in the past tense; "iteration" is one batch, "update" one optimizer step."""

    STARTED = "started"
    COMPLETED = "completed"
    EPOCH_STARTED = "epoch_started"
    EPOCH_COMPLETED = "epoch_completed"
    GET_BATCH_STARTED = "get_batch_started"
    GET_BATCH_COMPLETED = "get_batch_completed"
    ITERATION_STARTED = "iteration_started"
    ITERATION_COMPLETED = "iteration_completed"
    DATALOADER_STOP_ITERATION = "dataloader_stop_iteration"
    INTERRUPT = "interrupt"
    TERMINATE = "terminate", payloads.Terminated
    TERMINATE_SINGLE_EPOCH = "terminate_single_epoch", payloads.EpochTerminated
    EXCEPTION_RAISED = "exception_raised", payloads.ExceptionRaised
    GRADIENTS_READY = "gradients_ready", payloads.GradientsReady
    OPTIMIZER_STEP_COMPLETED = "optimizer_step_completed", payloads.OptimizerStepCompleted
    VALIDATION_STARTED = "validation_started"
    VALIDATION_COMPLETED = "validation_completed", payloads.ValidationCompleted
    ROLLOUT_STARTED = "rollout_started"
    REWARDS_COMPUTED = "rewards_computed", payloads.RewardsComputed
    ROLLOUT_COMPLETED = "rollout_completed", payloads.RolloutCompleted
    POLICY_UPDATED = "policy_updated", payloads.PolicyUpdated
    CHECKPOINT_SAVED = "checkpoint_saved", payloads.CheckpointSaved
    CHECKPOINT_LOADED = "checkpoint_loaded", payloads.CheckpointLoaded
    METRICS_LOGGED = "metrics_logged", payloads.MetricsLogged
    MEDIA_LOGGED = "media_logged", payloads.MediaLogged
    ANOMALY_DETECTED = "anomaly_detected", payloads.AnomalyDetected
    PREEMPTED = "preempted", payloads.Preempted
    HANDLER_FAILED = "handler_failed", payloads.HandlerFailed


LOOP_COUNTERS = ("iteration", "epoch")  # the run loop moves these; fire() never does

# Which attribute of engine.state an event's filters read. The first event named for an attribute advances it when
# fired; those after it carry the same number: an update's GRADIENTS_READY and OPTIMIZER_STEP_COMPLETED share one.
COUNTERS: dict[Events, str] = {
    Events.STARTED: "epoch",
    Events.COMPLETED: "epoch",
    Events.EPOCH_STARTED: "epoch",
    Events.EPOCH_COMPLETED: "epoch",
    Events.GET_BATCH_STARTED: "iteration",
    Events.GET_BATCH_COMPLETED: "iteration",
    Events.ITERATION_STARTED: "iteration",
    Events.ITERATION_COMPLETED: "iteration",
    Events.METRICS_LOGGED: "iteration",
    Events.MEDIA_LOGGED: "iteration",
    Events.ANOMALY_DETECTED: "iteration",
    Events.GRADIENTS_READY: "update",
    Events.OPTIMIZER_STEP_COMPLETED: "update",
    Events.VALIDATION_STARTED: "validation_round",
    Events.VALIDATION_COMPLETED: "validation_round",
    Events.ROLLOUT_STARTED: "rollout_round",
    Events.REWARDS_COMPUTED: "rollout_round",
    Events.ROLLOUT_COMPLETED: "rollout_round",
    Events.POLICY_UPDATED: "rollout_round",
    Events.CHECKPOINT_SAVED: "save",
    Events.CHECKPOINT_LOADED: "save",
}

READ_ONLY = frozenset({Events.CHECKPOINT_LOADED})  # loading is no save

_OURS = Events.__members__
_BY_KEY: dict[str, EventEnum] = {member.key: member for member in Events}


def canonical(event: Any) -> Any:
    """Our member, where ignite's own, a filtered one or the name of one is given; else the event itself."""
    if isinstance(event, str):
        return _OURS.get(event, event)
    event = getattr(event, "member", event)
    return _BY_KEY.get(event_key(event), event)


def event_key(event: object) -> str:
    """The unique key of an event: ours, ignite's, an ignite enum's or a string."""
    key = getattr(event, "key", None)
    if isinstance(key, str):
        return key
    if isinstance(event, str):
        return f"'{event}'"
    if isinstance(event, IgniteEvent):
        name = event._name_
        if name in _OURS and (isinstance(event, IgniteEvents) or not isinstance(event, IgniteEventEnum)):
            return _OURS[name].key  # ignite's filtered events have lost their enum: the name decides
        return f"{type(event).__qualname__}.{name}@{id(type(event))}"
    raise TypeError(f"{event!r}: no event; pass a member of Events or of an EventEnum, or a registered string")
