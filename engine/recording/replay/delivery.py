"""Which events were fired by the handlers of another one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pulsetrain.engine.events.compiled import Dispatch
from pulsetrain.engine.events.dispatch import Dispatcher
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.subscription import Order, Phase, Subscription
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.engine.recording.log.thinning import FREQUENT

__all__ = ["END", "STRUCTURE", "Open", "Place", "is_custom", "is_host", "may_be_nested"]

Place = tuple[int, int]  # of a handler in an event: its phase and its order within the phase
_START: Place = (Phase.COMPUTE, Order.FIRST - 1)
END: Place = (Phase.PERSIST + 1, Order.REGISTERED)

# events of the loop, the data and the step, which no handler of the same engine fires
_LOOP = frozenset(
    event.value
    for event in (
        *(Events.STARTED, Events.COMPLETED, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED),
        *(Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.DATALOADER_STOP_ITERATION),
        *(Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.INTERRUPT, Events.TERMINATE),
        *(Events.TERMINATE_SINGLE_EPOCH, Events.EXCEPTION_RAISED, Events.PREEMPTED, Events.CHECKPOINT_LOADED),
        *(Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_COMPLETED),
        # fired between two iterations, while the next batch is fetched: the log need not hold the event before them
        *(Events.ROLLOUT_STARTED, Events.REWARDS_COMPUTED, Events.ROLLOUT_COMPLETED),
    )
)
_HOSTS = frozenset(
    event.value for event in (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED)
)  # whose handlers fire other events
_VALIDATION = (Events.VALIDATION_STARTED.value, Events.VALIDATION_COMPLETED.value)
_COMPUTED = (*_VALIDATION, Events.POLICY_UPDATED.value)  # fired before the other handlers of their host
_LOGS = tuple(
    event.value
    for event in (Events.METRICS_LOGGED, Events.MEDIA_LOGGED, Events.ANOMALY_DETECTED, Events.RANKS_DIVERGED)
)
_SHIPPED = frozenset(event.value for event in Events)
# what has to be read to know which event was fired in which; iterations differ by their numbers
STRUCTURE = (_LOOP | {*_VALIDATION}) - FREQUENT


def is_host(event: str) -> bool:
    """Whether handlers of this event fire other events."""
    return event in _HOSTS


def is_custom(event: str) -> bool:
    """Whether an event was not shipped with the engine."""
    return event not in _SHIPPED


def may_be_nested(event: str) -> bool:
    """Whether a handler of the same engine may fire this event."""
    return event not in _LOOP


class Open:
    """An event whose handlers are called in parts, with the events in between that they fired.

    Args:
        event: the host.
        engine: that fires it.
        dispatch: of the engine and the event.
    """

    dispatch: Dispatch | None
    engine: Dispatcher | None
    event: LoggedEvent
    done: Place
    validating: bool

    __slots__ = ("called", "dispatch", "done", "engine", "event", "validating")

    def __init__(self, event: LoggedEvent, engine: Dispatcher | None = None, dispatch: Dispatch | None = None) -> None:
        self.event, self.engine, self.dispatch = event, engine, dispatch
        self.done = _START  # handlers before this place have been called
        self.validating = False
        self.called: set[int] = set()  # the serial numbers of its subscriptions whose handlers have been

    def contains(self, other: LoggedEvent) -> bool:
        """Whether the next event of the log was fired by a handler of this one."""
        event = self.event
        if event.event not in _HOSTS:
            return False  # it ends before the next event, unless a replayed handler fires that one again
        if other.engine == event.engine:
            if other.event in _LOOP or other.iteration != event.iteration:
                return False
            if other.event in _VALIDATION:
                self.validating = other.event == _VALIDATION[0]
            return True
        # after the end of this engine's run, another one runs by itself, unless it validates
        return bool(other.engine) and (self.validating or event.event != Events.COMPLETED.value)

    def place_of(self, other: LoggedEvent) -> Place:
        """Before which of this event's handlers the other event was fired."""
        if self.validating or other.event in _COMPUTED:
            return Phase.COMPUTE, Order.REGISTERED
        if other.engine != self.event.engine:
            return Phase.ACT, Order.REGISTERED
        if other.event in _LOGS and self.event.event == Events.COMPLETED.value:
            return Phase.COMPUTE, Order.REGISTERED
        if other.event == Events.CHECKPOINT_SAVED.value:
            return Phase.PERSIST, Order.REGISTERED
        return self.done if other.event == Events.HANDLER_FAILED.value else (Phase.OBSERVE, Order.REGISTERED)

    def advance(self, upto: Place, recalled: Collection[object]) -> Iterator[Subscription]:
        """The subscriptions before this place that were not called yet, while `recalled` is empty."""
        assert self.dispatch is not None
        due: Sequence[Subscription] | None = None
        while due is None or due:  # a handler may subscribe others
            for subscription in due or ():
                place = subscription.phase, subscription.order
                self.called.add(subscription.serial)
                self.done = max(self.done, place)
                yield subscription
                if recalled:
                    return
            subscriptions = self.dispatch.calls.subscriptions
            due = [each for each in subscriptions if (each.phase, each.order) < upto and each.serial not in self.called]
        self.done = max(self.done, upto)
