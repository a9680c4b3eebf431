"""How a logged event reaches its handlers, and which events were fired inside another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pulsetrain.engine.events.dispatch import Plan, annotate, emit_added
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.subscription import Phase
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.engine.recording.replay.payloads import payload_of

if TYPE_CHECKING:
    from pulsetrain.engine.recording.replay.engine import ReplayedEngine

__all__ = [
    "FIRST",
    "LAST",
    "STRUCTURE",
    "Open",
    "Place",
    "deliver",
    "deliver_part",
    "is_host",
    "may_be_nested",
    "record_of",
]

Place = tuple[float, float]  # of a handler in an event: its phase and its position there
FIRST, LAST = (float(Phase.COMPUTE), float("-inf")), (float(Phase.PERSIST) + 1, 0.0)

# the loop's own, those of its data and the step's, which are never fired in a handler of the same engine's
_LOOP = frozenset(
    event.value
    for event in (
        *(Events.STARTED, Events.COMPLETED, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED),
        *(Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.DATALOADER_STOP_ITERATION),
        *(Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.INTERRUPT, Events.TERMINATE),
        *(Events.TERMINATE_SINGLE_EPOCH, Events.EXCEPTION_RAISED, Events.PREEMPTED, Events.CHECKPOINT_LOADED),
        *(Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_COMPLETED),
        # between two iterations, while the next batch is got: a log need not hold what they come behind
        *(Events.ROLLOUT_STARTED, Events.REWARDS_COMPUTED, Events.ROLLOUT_COMPLETED),
    )
)
_HOSTS = frozenset(
    event.value for event in (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED)
)  # in whose handlers others are fired
_VALIDATION = (Events.VALIDATION_STARTED.value, Events.VALIDATION_COMPLETED.value)
_COMPUTED = (*_VALIDATION, Events.POLICY_UPDATED.value)  # before all else in the event that they are fired in
_LOGS = (Events.METRICS_LOGGED.value, Events.MEDIA_LOGGED.value, Events.ANOMALY_DETECTED.value)
_FREQUENT = (
    *(Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED),
    *(Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_COMPLETED),
)
# what has to be seen to know what was fired in what; an iteration is told from the next by its number
STRUCTURE = (_LOOP | {*_VALIDATION}) - {event.value for event in _FREQUENT}


def is_host(event: str) -> bool:
    """Whether other events are fired in this one's handlers."""
    return event in _HOSTS


def may_be_nested(event: str) -> bool:
    """Whether this event may be fired in a handler of its own engine's."""
    return event not in _LOOP


class Open:
    """An event whose handlers are called in parts, with the events in between that were fired in it."""

    __slots__ = ("done", "engine", "event", "plan", "validating")

    def __init__(self, event: LoggedEvent, engine: ReplayedEngine | None = None, plan: Plan | None = None) -> None:
        self.event, self.engine, self.plan = event, engine, plan
        self.done = FIRST  # handlers before this place have been called
        self.validating = False

    def takes(self, other: LoggedEvent) -> bool:
        """Whether the next event of the log was fired in this one."""
        event = self.event
        if other.engine == event.engine:
            if other.event in _LOOP or other.iteration != event.iteration:
                return False
            if other.event in _VALIDATION:
                self.validating = other.event == _VALIDATION[0]
            return True
        # another engine's run behind the end of this one's is not of its making, unless it validates
        return bool(other.engine) and (self.validating or event.event != Events.COMPLETED.value)

    def place_of(self, other: LoggedEvent) -> Place:
        """Before which of this event's handlers the other one was fired."""
        if self.validating or other.event in _COMPUTED:
            return float(Phase.COMPUTE), 0.0
        if other.engine != self.event.engine:
            return float(Phase.ACT), 0.0
        if other.event in _LOGS and self.event.event == Events.COMPLETED.value:
            return float(Phase.COMPUTE), 0.0
        if other.event == Events.CHECKPOINT_SAVED.value:
            return float(Phase.PERSIST), 0.0
        return (float(Phase.OBSERVE), 0.0) if other.event != Events.HANDLER_FAILED.value else self.done


def record_of(plan: Plan, logged: LoggedEvent) -> Event:
    """What handlers that ask for `event` are given."""
    return Event(
        logged.seq,
        logged.engine,
        logged.event,
        logged.epoch,
        logged.iteration,
        payload_of(plan.event, logged),
        logged.t,
    )


def deliver(engine: ReplayedEngine, plan: Plan, logged: LoggedEvent, record: Event | None = None) -> None:
    """Call everyone who hears the event, in order.

    Raises:
        Exception: a handler's own, with a note of where.
    """
    engine.last_event_name = plan.event
    calls, asking, value = plan.calls, plan.filtered, 0
    if asking:
        if plan.counter is None:  # subscribed on the bus, without a counter on this engine
            engine.require_counter(plan.event)
            return
        value = getattr(engine.state, plan.counter)
        if plan.low <= value < plan.high:
            calls, asking = plan.quiet, False
    if record is None and calls.rich:
        engine.bus.by_clock = logged.ord < 0
        record = record_of(plan, logged)
    subscription: Any = None
    try:
        for subscription in calls.subscriptions:
            if asking and subscription.filter is not None and not subscription.is_due(engine):
                continue
            if subscription.wants_event:
                record = record or record_of(plan, logged)
                subscription.call(engine, record)
            else:
                subscription.call(engine)
    except BaseException as error:
        annotate(error, engine, plan, subscription)
        raise
    if asking:
        plan.find_window(value)
    if (plan.calls if asking or not plan.filtered else plan.quiet) is not calls:
        emit_added(engine, plan, calls, None, logged.seq, record or record_of(plan, logged))


def deliver_part(open_event: Open, upto: Place) -> None:
    """Call those who hear it before this place and have not been called."""
    engine, plan, since = open_event.engine, open_event.plan, open_event.done
    if upto <= since or plan is None or engine is None:
        return
    engine.last_event_name = plan.event
    open_event.done = upto
    record = None
    for subscription in plan.calls.subscriptions:
        if not since <= (subscription.phase, subscription.position) < upto:
            continue
        try:
            if subscription.filter is not None and not subscription.is_due(engine):
                continue
            if subscription.wants_event:
                engine.bus.by_clock = open_event.event.ord < 0
                record = record or record_of(plan, open_event.event)
                subscription.call(engine, record)
            else:
                subscription.call(engine)
        except BaseException as error:
            annotate(error, engine, plan, subscription)
            raise
