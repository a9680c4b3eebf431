"""Events: the enums that name them, and the record that handlers get.

An event's key is (enum, name): pytorch-ignite's own `Events` members are the same events as ours, while a member
`STARTED` of any other enum is a different event.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from enum import EnumMeta
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, overload

import msgspec
from ignite.engine.events import CallableEventWithFilter as IgniteEvent
from ignite.engine.events import EventEnum as IgniteEventEnum
from ignite.engine.events import Events as IgniteEvents
from ignite.engine.events import EventsList as IgniteEventsList

from pulsetrain.engine.argument_checks import answers_unknown_keywords
from pulsetrain.engine.errors import did_you_mean
from pulsetrain.engine.events import payloads
from pulsetrain.engine.events.filters import EventFilter, Filter, build_filter

__all__ = [
    "COUNTERS",
    "Event",
    "EventEnum",
    "EventLike",
    "EventType",
    "Events",
    "EventsList",
    "FilteredEvent",
    "identify",
    "value_of",
]

if TYPE_CHECKING:
    from enum import nonmember

    from typing_extensions import TypeVar

    Payload = TypeVar("Payload", default=Any, covariant=True)
else:
    from typing import TypeVar

    Payload = TypeVar("Payload", covariant=True)  # defaults of type variables are newer than Python 3.11

EventLike: TypeAlias = IgniteEvent | str  # what a user may pass: a member, filtered or not, or a registered string

_serial = itertools.count()


class Event(msgspec.Struct, Generic[Payload], omit_defaults=True):
    """One fired event: the record that a handler with an `event` parameter gets.

    A handler may say which payload it expects, as in `def report(engine: Engine, event: Event[ValidationCompleted])`;
    type checkers then know the payload's fields. `Event` alone has a payload of any type.
    """

    seq: int  # position in the bus's total order
    engine: str  # name of the engine that fired it
    type: str  # the event's value, such as "iteration_completed"
    epoch: int
    iteration: int
    payload: Payload  # an object of the event's payload type, which the handler knows
    time_ns: int  # host wall clock, nanoseconds since 1970
    observed: bool = False  # fired at a moment that depends on the clock or on another thread: not reproducible


class EventType(IgniteEvent, Generic[Payload]):
    """A member of an enum of events, filtered or not: filtering by call, joining by `|`, equality by key.

    `Events.VALIDATION_COMPLETED` is an `EventType[ValidationCompleted]` for type checkers.
    """

    key: str
    payload_type: type | None

    @answers_unknown_keywords(repr)
    def __call__(
        self,
        event_filter: Filter | None = None,
        every: int | None = None,
        once: int | Sequence[int] | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> FilteredEvent[Payload]:
        """The same event with a filter: the handler is called only when the event's counter is due.

        Args:
            event_filter: called with the engine and the counter's value; returns whether it is due.
            every: due at each n-th value: 3 -> 3, 6, 9; with a bound, counted from `after` (3, after=4 -> 5, 8).
            once: due at this value, or at each of these, once in a run.
            before: due below this value only.
            after: due above this value only.

        Raises:
            ValueError: no argument, arguments that do not combine, or a value out of range.
            TypeError: event_filter is not callable.

        >>> Events.ITERATION_COMPLETED(every=100)
        Events.ITERATION_COMPLETED(every=100)
        """
        member = self.member if isinstance(self, FilteredEvent) else self
        assert isinstance(member, EventEnum)  # the other of the two subclasses
        return FilteredEvent(member, build_filter(self, event_filter, every, once, before, after))

    def __or__(self, other: object) -> EventsList:
        return EventsList() | self | other

    def __eq__(self, other: object) -> bool:
        if isinstance(other, IgniteEvent):
            return self.key == identify(other)[0]
        return isinstance(other, str) and self._name_ == other

    def __hash__(self) -> int:
        return hash(self._name_)  # equal to what ignite's own members hash to


class _EventEnumMeta(EnumMeta):
    """Suggests the nearest event for a name that an enum does not have."""

    if not TYPE_CHECKING:  # type checkers report the name themselves

        def __getattr__(cls, name: str) -> NoReturn:
            if name.startswith("_"):  # looked up by the enum machinery, and by libraries
                raise AttributeError(name)
            hint = did_you_mean(name, cls.__members__) or f"; it has {', '.join(cls.__members__) or 'none'}"
            # without name=, for which the interpreter would append a suggestion of its own
            raise AttributeError(f"{cls.__name__} has no event {name!r}{hint}", obj=cls)


class EventEnum(EventType, IgniteEventEnum, metaclass=_EventEnumMeta):
    """Base class of enums of events: a member is a value, or a value and the type of its payload.

    Register the members with `Engine.register_events` before they are fired.

    >>> from pulsetrain.engine.events.payloads import MetricsLogged
    >>> class RolloutEvents(EventEnum):
    ...     ROLLOUT_STARTED = "rollout_started"
    ...     REWARD_MEASURED = "reward_measured", MetricsLogged
    >>> RolloutEvents.REWARD_MEASURED.payload_type.__name__
    'MetricsLogged'
    >>> RolloutEvents.ROLLOUT_STARTED == Events.ROLLOUT_STARTED
    False
    """

    def __new__(cls, value: str, payload_type: type | None = None) -> EventEnum:
        """Make a member; the enum machinery calls this."""
        if not isinstance(value, str):
            raise TypeError(f"{cls.__name__}: an event's value needs to be a string, not {value!r}")
        if payload_type is not None and not isinstance(payload_type, type):
            raise TypeError(f"{cls.__name__}.{value}: the payload needs to be a type, not {payload_type!r}")
        member = IgniteEvent.__new__(cls)
        member._value_ = value
        return member

    def __init__(self, value: str, payload_type: type | None = None) -> None:
        for other in type(self):  # the enum machinery would make the second an alias without its own payload
            if other._value_ == value and other.payload_type is not payload_type:
                raise TypeError(
                    f"{type(self).__name__}.{self._name_}: the value {value!r} is {other}'s, whose payload differs; "
                    "give each event its own value"
                )
        self.filter: None = None
        self.payload_type = payload_type
        # unique for each member of each enum, also of two enums with one name; strings hash fastest
        self.key: str = f"{type(self).__qualname__}.{self._name_}#{next(_serial)}"

    # Enum's own __eq__ and __hash__ come before EventType's unless named here
    __eq__ = EventType.__eq__
    __hash__ = EventType.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self._name_}"

    __str__ = __repr__


class FilteredEvent(EventType[Payload]):
    """An event with a filter: what `Events.ITERATION_COMPLETED(every=100)` returns."""

    def __init__(self, member: EventEnum, event_filter: Filter | None) -> None:
        super().__init__(member._value_, event_filter, member._name_)
        self.member = member
        self.key: str = member.key
        self.payload_type: type | None = member.payload_type

    def __reduce__(self) -> tuple[type[FilteredEvent], tuple[object, ...]]:
        return FilteredEvent, (self.member, self.filter)  # the key is valid in this process only

    def __repr__(self) -> str:
        if self.filter is None:
            return repr(self.member)
        return f"{self.member!r}({self.filter if isinstance(self.filter, EventFilter) else f'filter={self.filter}'})"


class EventsList(IgniteEventsList):
    """Several events joined by `|`; joining returns a new list and changes neither side.

    >>> Events.STARTED | Events.ITERATION_COMPLETED(every=10)
    Events.STARTED | Events.ITERATION_COMPLETED(every=10)
    """

    def __or__(self, other: object) -> EventsList:
        joined = EventsList()
        joined._events = [*self._events]
        for event in other if isinstance(other, IgniteEventsList) else (other,):
            joined._append(event)  # type: ignore[arg-type]  # it rejects what is not an event
        return joined

    def __iter__(self) -> Iterator[IgniteEvent]:
        return iter(self._events)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self._events)) or "EventsList()"


@overload
def _event(value: str) -> nonmember[EventType[None]]: ...
@overload
def _event(value: str, payload_type: type[Payload]) -> nonmember[EventType[Payload]]: ...
def _event(value: str, payload_type: type | None = None) -> object:
    """What the enum makes a member of; type checkers take the member for an `EventType` of its payload."""
    return value, payload_type


class Events(EventEnum):
    """The events of a run. An iteration is one batch, an update is one optimizer step.

    >>> Events.VALIDATION_COMPLETED.value
    'validation_completed'
    >>> Events.VALIDATION_COMPLETED.payload_type.__name__
    'ValidationCompleted'
    """

    STARTED = _event("started")
    COMPLETED = _event("completed")
    EPOCH_STARTED = _event("epoch_started")
    EPOCH_COMPLETED = _event("epoch_completed")
    GET_BATCH_STARTED = _event("get_batch_started")
    GET_BATCH_COMPLETED = _event("get_batch_completed")
    ITERATION_STARTED = _event("iteration_started")
    ITERATION_COMPLETED = _event("iteration_completed")
    DATALOADER_STOP_ITERATION = _event("dataloader_stop_iteration")
    INTERRUPT = _event("interrupt")
    TERMINATE = _event("terminate", payloads.Terminated)
    TERMINATE_SINGLE_EPOCH = _event("terminate_single_epoch", payloads.EpochTerminated)
    EXCEPTION_RAISED = _event("exception_raised", payloads.ExceptionRaised)
    GRADIENTS_READY = _event("gradients_ready", payloads.GradientsReady)
    OPTIMIZER_STEP_COMPLETED = _event("optimizer_step_completed", payloads.OptimizerStepCompleted)
    VALIDATION_STARTED = _event("validation_started")
    VALIDATION_COMPLETED = _event("validation_completed", payloads.ValidationCompleted)
    ROLLOUT_STARTED = _event("rollout_started")
    REWARDS_COMPUTED = _event("rewards_computed", payloads.RewardsComputed)
    ROLLOUT_COMPLETED = _event("rollout_completed", payloads.RolloutCompleted)
    POLICY_UPDATED = _event("policy_updated", payloads.PolicyUpdated)
    CHECKPOINT_SAVED = _event("checkpoint_saved", payloads.CheckpointSaved)
    CHECKPOINT_LOADED = _event("checkpoint_loaded", payloads.CheckpointLoaded)
    METRICS_LOGGED = _event("metrics_logged", payloads.MetricsLogged)
    MEDIA_LOGGED = _event("media_logged", payloads.MediaLogged)
    ANOMALY_DETECTED = _event("anomaly_detected", payloads.AnomalyDetected)
    PREEMPTED = _event("preempted", payloads.Preempted)
    RANKS_DIVERGED = _event("ranks_diverged", payloads.RanksDiverged)
    HANDLER_FAILED = _event("handler_failed", payloads.HandlerFailed)


LOOP_COUNTERS = ("iteration", "epoch")  # the run loop moves these; fire() never does

# Which attribute of engine.state an event's filters read. Of several events that share an attribute, the first
# advances it when fired, and the others carry the same number: GRADIENTS_READY and OPTIMIZER_STEP_COMPLETED of one
# update, for example.
_COUNTED = {
    "epoch": (Events.STARTED, Events.COMPLETED, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED),
    "iteration": (
        *(Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED),
        *(Events.METRICS_LOGGED, Events.MEDIA_LOGGED, Events.ANOMALY_DETECTED, Events.RANKS_DIVERGED),
    ),
    "update": (Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_COMPLETED),
    "validation_round": (Events.VALIDATION_STARTED, Events.VALIDATION_COMPLETED),
    "rollout_round": (Events.ROLLOUT_STARTED, Events.REWARDS_COMPUTED, Events.ROLLOUT_COMPLETED, Events.POLICY_UPDATED),
    "save": (Events.CHECKPOINT_SAVED, Events.CHECKPOINT_LOADED),
}
COUNTERS: dict[EventType, str] = {event: counter for counter, events in _COUNTED.items() for event in events}

READ_ONLY = frozenset({Events.CHECKPOINT_LOADED})  # loading does not count as a save

_OURS: Mapping[str, EventLike] = Events.__members__


def identify(event: object, by_name: Mapping[str, EventLike] = _OURS) -> tuple[str, EventLike]:
    """Which event this is: its unique key, and the event itself without a filter.

    Args:
        event: a member of ours, of pytorch-ignite's or of another enum, filtered or not, or a name.
        by_name: the events that a name may mean.

    Raises:
        TypeError: it is not an event.

    >>> identify(Events.STARTED(every=2))[1]
    Events.STARTED
    >>> identify("STARTED")[1]
    Events.STARTED
    """
    if isinstance(event, EventEnum):  # the usual case first: filters ask for it at each value that may be due
        return event.key, event
    if isinstance(event, FilteredEvent):
        event = event.member
    elif isinstance(event, IgniteEvents):
        event = _OURS[event._name_]
    elif isinstance(event, str):
        event = by_name.get(event, event)
    elif isinstance(event, IgniteEvent) and not isinstance(event, IgniteEventEnum):
        event = by_name.get(event._name_, event)  # an ignite event with a filter no longer knows its enum
    if isinstance(event, EventEnum):
        return event.key, event
    if isinstance(event, str):
        return f"'{event}'", event
    if isinstance(event, IgniteEvent):
        return f"{type(event).__qualname__}.{event._name_}@{id(type(event))}", event
    raise TypeError(f"{event!r}: not an event; pass a member of Events or of an EventEnum, or a registered string")


def value_of(event: EventLike) -> str:
    """The value of an unfiltered event, which names it in records and logs; a string is its own value."""
    return event if isinstance(event, str) else str(event._value_)
