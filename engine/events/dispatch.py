"""The hot path: what one engine does when one event fires, compiled when subscriptions change."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pulsetrain.engine.events.names import LOOP_COUNTERS, NEVER, Event, EventFilter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pulsetrain.engine.events.engine_events import Emitter
    from pulsetrain.engine.events.subscription import Subscription

__all__ = ["Calls", "Plan", "Sequence", "annotate", "emit", "emit_added"]


class Sequence:
    """The number of the last event fired on a bus. An attribute on slots: 11 ns an increment, 40 on a dict subclass."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0


class Calls(list[Any]):
    """Callables taking the engine, in order of execution, beside the subscriptions they came from."""

    __slots__ = ("newest", "rich", "subscriptions")

    def __init__(self, subscriptions: Iterable[Subscription], newest: int) -> None:
        self.subscriptions = list(subscriptions)
        super().__init__(subscription.call for subscription in self.subscriptions)
        self.rich = any(subscription.wants_event for subscription in self.subscriptions)
        self.newest = newest  # serial number of the last subscription made before this was compiled

    def patch(self, subscription: Subscription) -> None:
        """Put the subscription's present callable in place; an iteration under way sees it."""
        for index, mine in enumerate(self.subscriptions):
            if mine is subscription:
                self[index] = subscription.call
        self.rich = self.rich or subscription.wants_event


class Plan:
    """What fires for one event of one engine.

    `low <= counter < high` is a window in which no filtered subscription is due: there `quiet` alone runs. Outside it
    every subscription is asked, and a new window is found. A window is right under any jump of the counter, because
    values outside it are always looked at.
    """

    __slots__ = (
        "__weakref__",
        "busy",
        "calls",
        "counter",
        "event",
        "filtered",
        "follows",
        "high",
        "hooked",
        "leads",
        "live",
        "low",
        "payload_type",
        "plain",
        "quiet",
        "seen",
        "strict",
    )

    def __init__(self, event: Any, counter: str | None, *, leads: bool, follows: bool, hooked: bool) -> None:
        self.event = event
        self.counter = counter
        self.leads = leads  # firing it always advances the counter
        self.follows = follows  # firing it advances the counter where no other event has done so since its last time
        self.seen = 0  # the counter's value when a following event was last fired
        self.hooked = hooked  # a subclass's _fire_event hears it, whether or not anyone subscribed
        self.payload_type: type | None = getattr(event, "payload_type", None)
        self.strict = leads or follows or self.payload_type is not None  # fire() has something to check or to count
        self.rebuild(())

    def rebuild(self, subscriptions: Iterable[Subscription]) -> None:
        """Compile anew from the subscriptions that hear this engine, in order of execution."""
        everything = list(subscriptions)
        newest = max((subscription.serial for subscription in everything), default=0)
        self.calls = Calls(everything, newest)
        unfiltered = [subscription for subscription in everything if subscription.filter is None]
        self.filtered = len(unfiltered) != len(everything)
        self.quiet = Calls(unfiltered, newest) if self.filtered else self.calls
        self.live = bool(everything) or self.hooked
        self.busy = bool(unfiltered) or self.hooked  # something runs inside the window too
        self.plain = bool(everything) and not (self.filtered or self.calls.rich or self.hooked)
        if self.filtered:
            self.low = self.high = 0  # an empty window: the next firing asks everyone
        else:
            self.low, self.high = -NEVER, NEVER

    def find_window(self, value: int) -> None:
        """After everyone was asked at `value`: the values above it at which nobody is due."""
        if self.counter not in LOOP_COUNTERS and self.quiet:
            return  # a handler may move the counter in mid-fire: ask each one in its turn
        high = NEVER
        for subscription in self.calls.subscriptions:
            if subscription.filter is None:
                continue
            if not isinstance(subscription.filter, EventFilter):
                return  # a user's function: ask every time
            high = min(high, subscription.filter.next_due(value))
        self.low, self.high = value + 1, high


def emit(engine: Emitter, plan: Plan, payload: Any, seq: int) -> None:
    """Run a live plan of any kind; the plain ones are run by `Emitter.fire` itself, which saves them a call."""
    engine.last_event_name = plan.event
    if not plan.filtered:
        _emit_each(engine, plan, plan.calls, payload, seq, asking=False)
        return
    if plan.counter is None:  # subscribed on the bus before this engine came, or before it registered the event
        engine.require_counter(plan.event)
        return
    state = engine.state
    if plan.low <= getattr(state, plan.counter) < plan.high:
        _emit_each(engine, plan, plan.quiet, payload, seq, asking=False)
    else:
        _emit_each(engine, plan, plan.calls, payload, seq, asking=True)
        plan.find_window(getattr(state, plan.counter))


def _emit_each(engine: Emitter, plan: Plan, calls: Calls, payload: Any, seq: int, *, asking: bool) -> None:
    """The general loop: builds the event's record when a receiver wants it, asks filters one by one."""
    event = build_event(engine, plan, payload, seq) if calls.rich else None
    subscription = None
    try:
        for subscription in calls.subscriptions:
            if asking and subscription.filter is not None and not subscription.is_due(engine):
                continue
            if not subscription.wants_event:
                subscription.call(engine)
                continue
            if event is None:  # patched in while this event fires
                event = build_event(engine, plan, payload, seq)
            subscription.call(engine, event)
    except BaseException as error:
        annotate(error, engine, plan, subscription)
        raise
    if (plan.calls if asking else plan.quiet) is not calls:
        emit_added(engine, plan, calls, payload, seq, event)


def emit_added(engine: Emitter, plan: Plan, done: Calls, payload: Any, seq: int, event: Event | None = None) -> None:
    """Run what was subscribed while the event fired; each of those may subscribe more."""
    newest = done.newest
    while True:
        added = min((s for s in plan.calls.subscriptions if s.serial > newest), key=lambda s: s.serial, default=None)
        if added is None:
            return
        newest = added.serial
        if added.filter is not None and not added.is_due(engine):
            continue
        try:
            if added.wants_event:
                event = event or build_event(engine, plan, payload, seq)
                added.call(engine, event)
            else:
                added.call(engine)
        except BaseException as error:
            annotate(error, engine, plan, added)
            raise


def build_event(engine: Emitter, plan: Plan, payload: Any, seq: int) -> Event:
    """The record of the event being fired now; `seq` is its own number, nested events have taken later ones."""
    state = engine.state
    event = plan.event
    return Event(
        seq,
        engine.name,
        event if isinstance(event, str) else event._value_,
        state.epoch,
        state.iteration,
        payload,
        time.time_ns(),
    )


def annotate(error: BaseException, engine: Emitter, plan: Plan, subscription: Subscription | None) -> None:
    """Say where the error came from, keeping its type."""
    where = subscription.description if subscription is not None else "a handler"
    state = engine.state
    error.add_note(
        f"in {where}, handling {plan.event} of {engine.name!r} at epoch {state.epoch}, iteration {state.iteration}"
    )
