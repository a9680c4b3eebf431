"""What one engine does when one event fires, compiled from its subscriptions whenever they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pulsetrain.engine.events.filters import NEVER, EventFilter
from pulsetrain.engine.events.names import LOOP_COUNTERS, EventLike, value_of
from pulsetrain.engine.events.subscription import Subscription

__all__ = ["Calls", "Dispatch", "Sequence"]


class Sequence:
    """The bus's counter of fired events. An attribute on slots: an increment costs 11 ns, 40 on a dict subclass."""

    observed: bool

    __slots__ = ("last", "observed")

    def __init__(self) -> None:
        self.last: int = 0  # the number of the last event fired
        self.observed = False  # whether the handler that is running now was called at an irreproducible moment

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Mark the events fired in this block as observed; only code that delivers an event enters it."""
        before, self.observed = self.observed, True
        try:
            yield
        finally:
            self.observed = before


class Calls(list[Callable[..., object]]):
    """Callables in the order of execution, and the subscriptions that they came from."""

    needs_event: bool

    __slots__ = ("filtered", "needs_event", "newest", "subscriptions", "takes_event")

    def __init__(self, subscriptions: list[Subscription], newest: int) -> None:
        self.subscriptions: list[Subscription] = subscriptions
        super().__init__(subscription.call for subscription in subscriptions)
        self.needs_event = any(subscription.needs_event for subscription in subscriptions)
        self.filtered: bool = any(subscription.filter is not None for subscription in subscriptions)
        self.takes_event: list[bool] = [subscription.needs_event for subscription in subscriptions]  # of each callable
        self.newest: int = newest  # serial number of the last subscription made before this was compiled

    def patch(self, subscription: Subscription) -> None:
        """Use the subscription's present callable, also in an iteration that is in progress."""
        for index, mine in enumerate(self.subscriptions):
            if mine is subscription:
                self[index], self.takes_event[index] = subscription.call, subscription.needs_event
        self.needs_event = self.needs_event or subscription.needs_event


class Dispatch:
    """What one engine does when one event fires; `Engine.dispatch` returns it, and it follows every change.

    `low <= counter < high` is a window in which no `EventFilter` is due: only `inside` runs there, the subscriptions
    without a filter and those with a function as their filter, which is asked every time. Outside of the window every
    filter is applied, and a new window is found. A window stays right however the counter jumps, because the filters
    are applied at every value outside of it.

    >>> from pulsetrain.engine import Engine, Events
    >>> engine = Engine(lambda engine, batch: None)
    >>> ready = engine.dispatch(Events.GRADIENTS_READY)
    >>> ready.live
    False
    >>> handle = engine.add_event_handler(Events.GRADIENTS_READY(every=10), lambda: None)
    >>> ready.live, ready.wants(9), ready.wants(10)
    (True, False, True)
    """

    leads: bool
    follows: bool
    strict: bool
    calls: Calls
    filtered: bool
    inside: Calls
    live: bool
    connected: bool
    always: bool
    plain: bool
    windows: list[EventFilter]
    low: int
    high: int

    def __init__(self, event: EventLike, sequence: Sequence, *, hooked: bool) -> None:
        self.event = event
        self.value: str = value_of(event)
        self.sequence = sequence
        self.hooked = hooked  # the engine's class overrides `_fire_event`, which gets every event
        self.payload_type: type | None = getattr(event, "payload_type", None)
        self.counter: str | None = None
        self.count_by(None, False, False)
        self.rebuild([])

    def count_by(self, counter: str | None, leads: bool, follows: bool) -> None:
        """Set the state attribute that counts the event.

        Args:
            counter: the attribute's name.
            leads: firing the event always advances it.
            follows: firing the event advances it if no other event has done so since the last time.
        """
        if counter is None or counter != self.counter:
            self.seen = 0  # the counter's value when a following event was last fired
        self.counter, self.leads, self.follows = counter, leads, follows
        self.strict = leads or follows or self.payload_type is not None  # fire() has something to check or to count

    def rebuild(self, subscriptions: list[Subscription]) -> None:
        """Compile the subscriptions, given in the order of execution."""
        newest = max((subscription.serial for subscription in subscriptions), default=0)
        self.calls = Calls(subscriptions, newest)
        inside = [subscription for subscription in subscriptions if not isinstance(subscription.filter, EventFilter)]
        self.filtered = self.calls.filtered
        self.inside = Calls(inside, newest) if len(inside) < len(subscriptions) else self.calls
        # Once for many handlers with an equal filter. Those of a subclass may be equal and have a state of their own.
        windows = [each.filter for each in subscriptions if isinstance(each.filter, EventFilter)]
        self.windows = list({each if type(each) is EventFilter else id(each): each for each in windows}.values())
        active = [subscription.filter for subscription in subscriptions if not subscription.passive]
        # the filters of those that are not passive; None if one of them may be due at any value
        filters = [each for each in active if isinstance(each, EventFilter)]
        self.active_filters: list[EventFilter] | None = None if self.hooked or len(filters) < len(active) else filters
        self.live = bool(active) or self.hooked
        self.connected = bool(subscriptions) or self.hooked  # firing reaches someone, be it a passive subscription
        self.always = bool(inside) or self.hooked  # inside the window, too
        self.plain = bool(subscriptions) and not (self.filtered or self.calls.needs_event or self.hooked)
        if self.filtered:
            self.low = self.high = 0  # an empty window: the next firing applies every filter
        else:
            self.low, self.high = -NEVER, NEVER

    def patch(self, subscription: Subscription) -> None:
        """Use the subscription's present callable, also while the event is being fired."""
        self.calls.patch(subscription)
        if self.inside is not self.calls:
            self.inside.patch(subscription)

    def wants(self, count: int) -> bool:
        """Whether firing the event with its counter at `count` would reach a subscription that is not passive.

        A filter that is a function cannot be asked in advance: it counts as due.
        """
        if not self.live:
            return False
        if self.active_filters is None:
            return True
        if self.low <= count < self.high:
            return False
        if any(each(None, count) for each in self.active_filters):
            return True
        self.find_window(count)
        return False

    def find_window(self, value: int) -> None:
        """Find the values above `value` at which nothing is due; the filters were applied at `value` itself."""
        if self.counter not in LOOP_COUNTERS and self.inside:
            return  # a handler may advance the counter in the middle of the event: apply each filter in its turn
        high = min([each.next_due(value) for each in self.windows], default=NEVER)
        self.low, self.high = value + 1, high
