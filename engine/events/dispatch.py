"""The hot path: every way in which an event reaches its handlers.

`Dispatcher` fires the events of an engine: `fire`, `post`, ignite's `fire_event`. A replay delivers the events of a log
through `deliver`, with its own records.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.compiled import Calls, Dispatch
from pulsetrain.engine.events.ignite import arguments_of, payload_of
from pulsetrain.engine.events.names import Event, EventLike
from pulsetrain.engine.events.registry import EventRegistry
from pulsetrain.engine.events.subscription import Subscription

__all__ = ["Dispatcher", "check_payload", "deliver", "deliver_to"]


def deliver(engine: Dispatcher, dispatch: Dispatch, source: object, seq: int) -> None:
    """Run every handler that is due, in order.

    Args:
        engine: that fires.
        dispatch: of the engine and the event; a connected one.
        source: what `engine.new_event` makes the event's record of, if a handler needs it: the payload.
        seq: the event's number.

    Raises:
        BaseException: a handler's own error, with a note that says where.
    """
    engine.last_event_name = dispatch.event
    calls, filtering = dispatch.calls, dispatch.filtered
    if dispatch.plain:
        call = None
        try:
            for call in calls:
                call(engine)
        except BaseException as error:
            annotate(error, engine, dispatch, subscription_of(calls, call))
            raise
        if dispatch.calls is not calls:
            deliver_added(engine, dispatch, calls, source, seq)
        return
    value = 0
    if filtering:
        if dispatch.counter is None:  # subscribed on the bus before this engine joined, or registered the event
            engine.require_counter(dispatch.event)
            return
        value = getattr(engine.state, dispatch.counter)
        if dispatch.low <= value < dispatch.high:
            calls, filtering = dispatch.inside, False
    event = engine.new_event(dispatch, source, seq) if calls.needs_event else None
    if calls.filtered:
        event = deliver_to(calls.subscriptions, engine, dispatch, source, seq, event)
    else:
        call = None
        try:
            for call, takes_event in zip(calls, calls.takes_event, strict=True):
                if not takes_event:
                    call(engine)
                    continue
                if event is None:  # a profiler has replaced the handler while this event fires
                    event = engine.new_event(dispatch, source, seq)
                call(engine, event)
        except BaseException as error:
            annotate(error, engine, dispatch, subscription_of(calls, call))
            raise
    if (dispatch.calls if filtering else dispatch.inside) is not calls:
        deliver_added(engine, dispatch, calls, source, seq, event)
    if filtering:
        dispatch.find_window(value)


def deliver_to(
    subscriptions: Iterable[Subscription],
    engine: Dispatcher,
    dispatch: Dispatch,
    source: object,
    seq: int,
    event: Event | None = None,
) -> Event | None:
    """Run the handlers of these subscriptions, if they are due; returns the event's record, if one needed it."""
    subscription = None
    try:
        for subscription in subscriptions:
            if subscription.filter is not None:
                # read for each: a handler may have moved it
                value = getattr(engine.state, dispatch.counter, 0) if dispatch.counter is not None else 0
                if not subscription.is_due(engine, value):
                    continue
                if subscription.observed:
                    if subscription.needs_event:
                        event = event or engine.new_event(dispatch, source, seq)
                    with dispatch.sequence.observing():
                        subscription(engine, event)
                    continue
            if not subscription.needs_event:
                subscription.call(engine)
                continue
            if event is None:  # a profiler has replaced the handler while this event fires
                event = engine.new_event(dispatch, source, seq)
            subscription.call(engine, event)
    except BaseException as error:
        annotate(error, engine, dispatch, subscription)
        raise
    return event


def deliver_added(
    engine: Dispatcher, dispatch: Dispatch, done: Calls, source: object, seq: int, event: Event | None = None
) -> None:
    """Run the handlers that were subscribed while the event fired; each of them may subscribe more."""
    newest = done.newest
    while True:
        added = min(
            (each for each in dispatch.calls.subscriptions if each.serial > newest),
            key=lambda each: each.serial,
            default=None,
        )
        if added is None:
            return
        newest = added.serial
        event = deliver_to([added], engine, dispatch, source, seq, event)


def subscription_of(calls: Calls, call: Callable[..., object] | None) -> Subscription | None:
    """The subscription whose callable this is."""
    return next((each for each in calls.subscriptions if each.call is call), None)


def annotate(error: BaseException, engine: Dispatcher, dispatch: Dispatch, subscription: Subscription | None) -> None:
    """Note on the error where it came from, keeping its type."""
    where = subscription.description if subscription is not None else "a handler"
    state = engine.state
    error.add_note(
        f"in {where}, handling {dispatch.event} of {engine.name!r} at epoch {state.epoch}, iteration {state.iteration}"
    )


def check_payload(verb: str, event: EventLike, payload: object) -> None:
    """Check that the payload is of the event's type.

    Raises:
        TypeError: it is not.
    """
    payload_type: type | None = getattr(event, "payload_type", None)
    if type(payload) is not (payload_type or type(None)):
        wanted = payload_type.__name__ if payload_type is not None else "no payload"
        raise TypeError(f"{verb}({event}, {payload!r}): this event carries {wanted}, not {type(payload).__name__}")


class Dispatcher(EventRegistry):
    """The side of an engine that fires its events."""

    last_event_name: Any  # an event; ignite's annotation names its own enum only

    def __init__(self, bus: EventBus) -> None:
        super().__init__()
        self.bus = bus
        self.last_event_name = None
        self._sequence = bus.sequence
        self._dispatches: dict[str, Dispatch] = {}
        self._posts: deque[tuple[EventLike, object]] = deque()
        self._attention = False
        self._hooked = self._fire_event != MethodType(Dispatcher._fire_event, self)
        self._in_flight: tuple[Dispatch, object, int] | None = None
        self._deliver: Callable[..., None] = Dispatcher._call_hook if self._hooked else deliver

    def dispatch(self, event: EventLike) -> Dispatch:
        """What happens when the event fires here: for code that would prepare a payload in vain, again and again.

        The object stays the same and follows every subscription. Ask its `live` and `wants(count)`.

        Raises:
            ValueError: the event is not registered on this engine.
        """
        key, event = self._identify(event)
        found = self._dispatches.get(key)
        if found is None:
            self._require_registered(event)
            found = self._dispatches[key] = Dispatch(event, self._sequence, hooked=self._hooked)
            found.count_by(*self._counting(key, event))
            self.bus.signal(event).compile(id(self), found)
        return found

    def new_event(self, dispatch: Dispatch, payload: Any, seq: int) -> Event:
        """The record of the event that is being fired; `seq` is its own number, since nested events have later ones."""
        state = self.state
        return Event(
            seq,
            self.name,
            dispatch.value,
            state.epoch,
            state.iteration,
            payload,
            time.time_ns(),
            dispatch.sequence.observed,
        )

    def hears(self, event: EventLike) -> bool:
        """Whether a handler is subscribed that is not passive; if not, there is no need to prepare a payload.

        >>> from pulsetrain.engine import Engine, Events
        >>> engine = Engine(lambda engine, batch: None)
        >>> subscription = engine.bus.subscribe(Events.METRICS_LOGGED, print, passive=True)
        >>> engine.hears(Events.METRICS_LOGGED)
        False
        """
        return self.dispatch(event).live

    def register_events(self, *event_names: EventLike, event_to_attr: Mapping[Any, str] | None = None) -> None:
        super().register_events(*event_names, event_to_attr=event_to_attr)
        for key, dispatch in self._dispatches.items():  # in place: the loop and others hold on to them
            counting = self._counting(key, dispatch.event)
            if counting != (dispatch.counter, dispatch.leads, dispatch.follows):
                dispatch.count_by(*counting)  # the window was in the other counter's values
                self.bus.signal(dispatch.event).compile(id(self), dispatch)

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Set attributes of the state that count events, as a checkpoint does.

        Of the events that share a counter, the next one fired then advances it.

        >>> from pulsetrain.engine import Engine
        >>> engine = Engine(lambda engine, batch: None)
        >>> engine.set_counters({"epoch": 3, "iteration": 30, "update": 15})
        >>> engine.state.update
        15
        """
        for name, value in counters.items():
            setattr(self.state, name, value)
        for dispatch in self._dispatches.values():
            if dispatch.counter is not None:
                dispatch.seen = getattr(self.state, dispatch.counter)

    def fire(self, event: EventLike, payload: object = None, *, observed: bool = False) -> None:
        """Fire the event now: it takes the bus's next number, advances its counter, and runs the handlers that are due.

        Args:
            event: registered on this engine.
            payload: an object of the event's payload type, or None for an event without one.
            observed: the moment or the values depend on the clock, another thread or the machine. A recording does not
                expect such an event when the run is repeated. Events fired by handlers of an observed event are
                observed, too.

        Raises:
            TypeError: the payload is not of the event's type.
            ValueError: the event is not registered on this engine.

        >>> from pulsetrain.engine import Engine, Events
        >>> from pulsetrain.engine.events.payloads import MetricsLogged
        >>> engine = Engine(lambda engine, batch: None)
        >>> @engine.on(Events.METRICS_LOGGED)
        ... def show(engine, event):
        ...     print(event.seq, event.payload.metrics, event.observed)
        >>> engine.fire(Events.METRICS_LOGGED, MetricsLogged(metrics={"speed": 7.0}), observed=True)
        1 {'speed': 7.0} True
        """
        if observed:
            with self._sequence.observing():
                self.fire(event, payload)
            return
        try:
            dispatch = self._dispatches[event.key]  # type: ignore[union-attr]  # ours have it
        except (AttributeError, KeyError):
            dispatch = self.dispatch(event)
        if dispatch.strict or payload is not None:
            self._check(dispatch, payload)
        sequence = self._sequence
        seq = sequence.last = sequence.last + 1
        if dispatch.plain:  # as in `deliver`, which would cost one call more
            self.last_event_name = dispatch.event
            calls = dispatch.calls
            call = None
            try:
                for call in calls:
                    call(self)
            except BaseException as error:
                annotate(error, self, dispatch, subscription_of(calls, call))
                raise
            if dispatch.calls is not calls:
                deliver_added(self, dispatch, calls, payload, seq)
        elif dispatch.connected and (
            dispatch.always
            or dispatch.counter is None
            or not dispatch.low <= getattr(self.state, dispatch.counter) < dispatch.high
        ):
            self._deliver(self, dispatch, payload, seq)

    def post(self, event: EventLike, payload: object = None) -> None:
        """Fire at the next safe point of the loop (of the next run, when idle); from any thread or signal handler.

        The event is observed: when it arrives depends on the other thread.

        Raises:
            TypeError, ValueError: as `fire`, at once.
        """
        _, event = self._require_registered(event)  # nothing is compiled here: the bus belongs to its own thread
        check_payload("post", event, payload)
        self._posts.append((event, payload))
        self._attention = True

    def withdraw(self, payload: object) -> bool:
        """Withdraw what was posted with this very payload object; returns whether it had not been fired yet."""
        found = False
        for _ in range(len(self._posts)):  # not deque.remove(): another thread, or a signal, may post meanwhile
            post = self._posts.popleft()
            if post[1] is payload:
                found = True
            else:
                self._posts.append(post)
        return found

    def own_subscriptions(self, event_name: EventLike | None = None) -> list[Subscription]:
        """The subscriptions to this engine alone, to one event or to all, in order."""
        events = self.registered_events if event_name is None else (self._identify(event_name)[1],)
        return [each for event in events for each in self.bus.signal(event).subscriptions(id(self), exclusive=True)]

    def fire_event(self, event_name: EventLike) -> None:
        """Ignite's form of `fire`: no payload, and the caller advances the event's counter."""
        self._require_registered(event_name)
        self._fire_event(event_name)

    def _fire_event(self, event_name: EventLike, *event_args: object, **event_kwargs: object) -> None:
        """Called for every event if a subclass overrides it, as ignite's subclasses do; else by `fire_event` alone."""
        dispatch = self.dispatch(event_name)
        in_flight = self._in_flight
        if in_flight is not None and in_flight[0] is dispatch:  # on its way from fire()
            _, payload, seq = in_flight
            self._in_flight = None
        else:
            payload = payload_of(dispatch.event, event_args, event_kwargs)
            seq = self._sequence.last = self._sequence.last + 1
        self.last_event_name = dispatch.event
        if dispatch.calls:
            deliver(self, dispatch, payload, seq)

    def _call_hook(self, dispatch: Dispatch, payload: object, seq: int) -> None:
        """Pass an event to a subclass's `_fire_event`, with ignite's own arguments."""
        before, self._in_flight = self._in_flight, (dispatch, payload, seq)
        try:
            args, kwargs = arguments_of(dispatch.event, payload)
            self._fire_event(dispatch.event, *args, **kwargs)
        finally:
            self._in_flight = before

    def _check(self, dispatch: Dispatch, payload: object) -> None:
        if type(payload) is not dispatch.payload_type and not (payload is None and dispatch.payload_type is None):
            check_payload("fire", dispatch.event, payload)
        if dispatch.leads or dispatch.follows:
            assert dispatch.counter is not None
            count = getattr(self.state, dispatch.counter, 0)
            if dispatch.leads or dispatch.seen == count:
                count += 1
                setattr(self.state, dispatch.counter, count)
            dispatch.seen = count

    def _deliver_posts(self) -> None:
        for _ in range(len(self._posts)):  # what their handlers post waits for the next safe point
            event, payload = self._posts.popleft()
            self.fire(event, payload, observed=True)
