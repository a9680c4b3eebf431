"""Registering handlers and firing events: the side of an engine that faces its bus."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from ignite.engine.events import CallableEventWithFilter as IgniteEvent
from ignite.engine.events import EventEnum as IgniteEventEnum
from ignite.engine.events import Events as IgniteEvents
from ignite.engine.events import EventsList

from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.dispatch import Plan, annotate, emit, emit_added
from pulsetrain.engine.events.handler_signature import LEGACY_FIELDS
from pulsetrain.engine.events.ignite import HandlerTable
from pulsetrain.engine.events.names import LOOP_COUNTERS, READ_ONLY, EventEnum, Events, event_key
from pulsetrain.engine.events.subscription import Handle, OnError, Phase, Subscription

__all__ = ["Emitter"]

F = TypeVar("F", bound=Callable[..., Any])


class Emitter:
    """Registers handlers on a bus in the engine's name, and fires.

    Events are looked up by key in `_plans`; an engine that subclasses `_fire_event` sees every event, heard or not.
    """

    state: Any
    last_event_name: Any
    name: str
    bus: EventBus
    run_number: int

    def _join(self, name: str | None, bus: EventBus | None) -> None:
        self.bus = EventBus() if bus is None else bus  # never `bus or ...`: an empty blinker namespace is falsy
        self.name = self.bus.join(self, name)
        self.run_number = 0  # runs begun from zero: what `once` means by once
        self.last_event_name = None
        self._sequence = self.bus.sequence
        self._plans: dict[str, Plan] = {}
        self._counters: dict[str, str] = {}
        self._allowed_events: list[Any] = []
        self._by_name: dict[str, Any] = {}
        self._posts: deque[tuple[Any, Any]] = deque()
        self._attention = False
        self._hooked = type(self)._fire_event is not Emitter._fire_event
        self._in_flight: tuple[Plan, Any, int] | None = None
        self._emit: Callable[..., None] = _emit_through_hook if self._hooked else emit

    @property
    def _event_handlers(self) -> HandlerTable:
        return HandlerTable(self)  # ignite's profilers edit it in place

    def register_events(self, *event_names: Any, event_to_attr: dict[Any, str] | None = None) -> None:
        """Allow custom events on this engine; `event_to_attr` names the state attribute that counts one.

        `fire` advances that attribute before filters look. Where several events share one, the first registered does;
        the others carry the same number, and advance it only where the first was not fired.

        Raises:
            TypeError: a name is neither a string nor an EventEnum member.
            ValueError: event_to_attr is no dictionary, or names an event that is not registered here.
        """
        if not (event_to_attr is None or isinstance(event_to_attr, dict)):
            raise ValueError(f"Expected event_to_attr to be dictionary. Got {type(event_to_attr)}.")
        for event in event_to_attr or ():
            if event not in event_names:
                raise ValueError(
                    f"register_events(event_to_attr={{{event!r}: ...}}): not among the events registered by this call: "
                    f"{', '.join(map(str, event_names)) or 'none'}"
                )
        for index, event in enumerate(event_names):  # all are checked before the first is registered
            if not isinstance(event, (str, IgniteEventEnum)):
                raise TypeError(
                    f"Value at {index} of event_names should be a str or EventEnum, but given {event}; "
                    "pass the members of an enum, not the enum: register_events(*MyEvents)"
                )
        for event in event_names:
            self._allowed_events.append(event)
            name = event if isinstance(event, str) else event._name_
            self._by_name.setdefault(name, event)
            counter = event_to_attr.get(event) if event_to_attr else None
            if counter is not None and self._counters.get(event_key(event)) != counter:
                self._counters.pop(event_key(event), None)  # it is the last to be registered for this counter
                self._counters[event_key(event)] = counter
        self._set_counters()
        self._recount()

    @property
    def registered_events(self) -> tuple[Any, ...]:
        """The events that may be fired on this engine, each once, in the order of their registration."""
        events: dict[str, Any] = {}
        for event in self._allowed_events:
            resolved = self._resolve(event)  # an event and its name are one
            events.setdefault(event_key(resolved), resolved)
        return tuple(events.values())

    def has_registered_events(self, event: Any) -> bool:
        """Whether the event may be fired on this engine."""
        try:
            return event_key(self._resolve(event)) in {event_key(known) for known in self._allowed_events}
        except TypeError:
            return False

    def counter_of(self, event: Any) -> str | None:
        """The state attribute that the event's filters read, or None."""
        return self._counters.get(event_key(self._resolve(event)))

    def counter_value(self, event: Any) -> int:
        """The counter's present value, 0 for an event without one."""
        counter = self._counters.get(event_key(event))
        return getattr(self.state, counter, 0) if counter is not None else 0

    def require_counter(self, event: Any) -> None:
        """Refuse a filter that could never be answered.

        Raises:
            ValueError: the event has no counter on this engine.
        """
        if self.counter_of(event) is None:
            raise ValueError(
                f"{event}: a filter needs a counter, and this event has none on {self.name!r}; "
                "register it with register_events(..., event_to_attr={event: 'attribute'})"
            )

    def _set_counters(self) -> None:
        for counter in self._counters.values():
            if not hasattr(self.state, counter):
                setattr(self.state, counter, 0)

    def _recount(self) -> None:
        """Let the plans follow the counters, each in its place: the loop and others hold on to them."""
        for key, plan in self._plans.items():
            counter, leads, follows = self._counting(key, plan.event)
            if (counter, leads, follows) == (plan.counter, plan.leads, plan.follows):
                continue
            if counter != plan.counter:
                plan.seen = 0
            plan.counter, plan.leads, plan.follows = counter, leads, follows
            plan.strict = leads or follows or plan.payload_type is not None
            self.bus.signal(plan.event).watch(id(self), plan)  # its window was in the other counter's values

    def _counting(self, key: str, event: Any) -> tuple[str | None, bool, bool]:
        """The event's counter, whether firing it leads (always advances it), and whether it follows another event."""
        counter = self._counters.get(key)
        if counter is None or counter in LOOP_COUNTERS or event in READ_ONLY:
            return counter, False, False
        first = next(k for k, name in self._counters.items() if name == counter)
        return counter, first == key, first != key

    def _resolve(self, event: Any) -> Any:
        """The registered event meant by a member, a filtered event or a name."""
        if isinstance(event, EventEnum):
            return event
        member = getattr(event, "member", None)
        if member is not None:
            return member
        if isinstance(event, IgniteEvents):
            return Events.__members__[event._name_]
        if isinstance(event, str):
            return self._by_name.get(event, event)
        if isinstance(event, IgniteEvent) and not isinstance(event, IgniteEventEnum):
            return self._by_name.get(event._name_, event)  # ignite's filtered events have lost their enum
        return event

    def _assert_allowed_event(self, event: Any) -> None:
        if not self.has_registered_events(event):
            hint = "custom events are allowed by register_events()"
            if isinstance(event, str) and event.upper() in Events.__members__:
                hint = f"did you mean Events.{event.upper()}?"
            raise ValueError(f"Event {event} is not a valid event for this {type(self).__name__}; {hint}")

    def add_event_handler(
        self,
        event_name: Any,
        handler: Callable[..., Any],
        *args: Any,
        phase: Phase = Phase.ACT,
        on_error: OnError = "raise",
        **kwargs: Any,
    ) -> Handle:
        """Call the handler when the event fires on this engine, until it is removed.

        It is called as (engine, event, *args) if its second parameter is named `event` and has no default, else as
        (engine, *args) if that fits, else as (*args).

        Args:
            event_name: an event, filtered or not, or several joined by `|`.
            handler: any callable.
            args: passed on to it.
            phase: where in the event it runs: COMPUTE, ACT, OBSERVE, PERSIST; inside a phase by registration.
            on_error: "raise" ends the run with the handler's error; "warn" logs it once, counts it, fires
                HANDLER_FAILED and goes on.
            kwargs: passed on to it.

        Raises:
            ValueError: the event is not allowed here, a filter is on an event without a counter, or the handler's
                signature fits nothing.
            TypeError: the handler is no callable.
        """
        events = list(event_name) if isinstance(event_name, EventsList) else [event_name]
        resolved = []
        for event in events:  # all are checked before the first is connected
            self._assert_allowed_event(event)
            if getattr(event, "filter", None) is not None:
                self.require_counter(event)
            resolved.append((self._resolve(event), getattr(event, "filter", None)))
        subscriptions: list[Subscription] = []
        try:
            for event, event_filter in resolved:
                subscriptions.append(
                    self.bus.connect_handler(
                        event,
                        handler,
                        args,
                        kwargs,
                        event_filter=event_filter,
                        sender=self,
                        phase=phase,
                        on_error=on_error,
                        by_engine=True,
                    )
                )
        except Exception:
            for subscription in subscriptions:
                subscription.cancel()
            raise
        shown = handler
        if not isinstance(event_name, EventsList) and subscriptions[0].filter is not None:
            shown = HandlerTable.wrapped(subscriptions[0], self)
        return Handle(event_name, shown, self, subscriptions)

    def on(
        self,
        event_name: Any,
        *args: Any,
        phase: Phase = Phase.ACT,
        on_error: OnError = "raise",
        **kwargs: Any,
    ) -> Callable[[F], F]:
        """`add_event_handler` as a decorator; the function stays what it was."""

        def decorate(handler: F) -> F:
            self.add_event_handler(event_name, handler, *args, phase=phase, on_error=on_error, **kwargs)
            return handler

        return decorate

    def has_event_handler(self, handler: Callable[..., Any], event_name: Any | None = None) -> bool:
        """Whether the handler is registered on the event, or on any."""
        return any(subscription.is_handler(handler) for subscription in self._own_subscriptions(event_name))

    def remove_event_handler(self, handler: Callable[..., Any], event_name: Any) -> None:
        """Undo every registration of the handler on the event; `Handle.remove` undoes one.

        Raises:
            ValueError: it is not registered there.
        """
        mine = [s for s in self._own_subscriptions(event_name) if s.is_handler(handler)]
        if not mine:
            if not self._own_subscriptions(event_name):
                raise ValueError(f"Input event name '{event_name}' does not exist among the events with handlers")
            raise ValueError(f"Input handler '{handler}' is not found among registered event handlers")
        for subscription in mine:
            subscription.cancel()

    def _own_subscriptions(self, event_name: Any | None) -> list[Subscription]:
        events = self.registered_events if event_name is None else (self._resolve(event_name),)
        return [s for event in events for s in self.bus.signal(event).subscriptions(id(self), exclusive=True)]

    def hears(self, event: Any) -> bool:
        """Whether anyone listens, so that nobody builds a payload for nothing."""
        return self._plan(event).live

    def fire(self, event: Any, payload: Any = None) -> None:
        """Fire now, on this thread: takes the bus's next number, advances the event's counter, runs who hears it.

        Raises:
            TypeError: the payload is not of the event's type.
            ValueError: the event is not allowed on this engine.
        """
        try:
            plan = self._plans[event.key]
        except (AttributeError, KeyError):
            plan = self._plan(event)
        if plan.strict or payload is not None:
            self._check(plan, payload)
        sequence = self._sequence
        seq = sequence.last = sequence.last + 1
        if plan.plain:  # everyone takes (engine) and nobody filters: run them here, a call less than emit()
            self.last_event_name = plan.event
            calls = plan.calls
            call = None
            try:
                for call in calls:
                    call(self)
            except BaseException as error:
                annotate(error, self, plan, next((s for s in calls.subscriptions if s.call is call), None))
                raise
            if plan.calls is not calls:
                emit_added(self, plan, calls, payload, seq)
        elif plan.live and (
            plan.busy or plan.counter is None or not plan.low <= getattr(self.state, plan.counter) < plan.high
        ):
            self._emit(self, plan, payload, seq)

    def post(self, event: Any, payload: Any = None) -> None:
        """Fire at the next safe point of the loop (of the next run, when idle); from any thread or signal handler.

        Raises:
            TypeError, ValueError: as `fire`, at once.
        """
        self._assert_allowed_event(event)
        event = self._resolve(event)  # no plan is made here: the bus belongs to its own thread
        wanted = getattr(event, "payload_type", None)
        if type(payload) is not (wanted or type(None)):
            raise _wrong_payload("post", event, wanted, payload)
        self._posts.append((event, payload))
        self._attention = True

    def fire_event(self, event_name: Any) -> None:
        """Ignite's form of `fire`: no payload, and the event's counter is the caller's to move."""
        self._assert_allowed_event(event_name)
        self._fire_event(event_name)

    def _fire_event(self, event_name: Any, *event_args: Any, **event_kwargs: Any) -> None:
        """Where every event passes in an engine that overrides this; else only what `fire_event` fires."""
        plan = self._plan(event_name)
        in_flight = self._in_flight
        if in_flight is not None and in_flight[0] is plan:  # on its way from fire()
            _, payload, seq = in_flight
            self._in_flight = None
        else:
            payload = None
            values = [*event_args, *event_kwargs.values()]
            if values and plan.payload_type is None:
                raise TypeError(f"{plan.event}: carries no payload, but was fired with {values}")
            if values:
                field = next(iter(plan.payload_type.__dataclass_fields__))  # type: ignore[union-attr]  # checked above
                payload = plan.payload_type(**{field: values[0]})  # type: ignore[misc]
            seq = self._sequence.last = self._sequence.last + 1
        self.last_event_name = plan.event
        if plan.calls:
            emit(self, plan, payload, seq)

    def _plan(self, event: Any) -> Plan:
        event = self._resolve(event)
        key = event_key(event)
        plan = self._plans.get(key)
        if plan is None:
            self._assert_allowed_event(event)
            counter, leads, follows = self._counting(key, event)
            plan = Plan(event, counter, leads=leads, follows=follows, hooked=self._hooked)
            self.bus.signal(event).watch(id(self), plan)
            self._plans[key] = plan
        return plan

    def _check(self, plan: Plan, payload: Any) -> None:
        if type(payload) is not plan.payload_type and not (payload is None and plan.payload_type is None):
            raise _wrong_payload("fire", plan.event, plan.payload_type, payload)
        if plan.leads or plan.follows:
            assert plan.counter is not None
            count = getattr(self.state, plan.counter, 0)
            if plan.leads or plan.seen == count:
                count += 1
                setattr(self.state, plan.counter, count)
            plan.seen = count

    def _deliver_posts(self) -> None:
        bus, before = self.bus, self.bus.by_clock
        for _ in range(len(self._posts)):  # what their handlers post waits for the next safe point
            bus.by_clock = True
            try:
                self.fire(*self._posts.popleft())
            finally:
                bus.by_clock = before


def _wrong_payload(verb: str, event: Any, payload_type: type | None, payload: Any) -> TypeError:
    wanted = payload_type.__name__ if payload_type is not None else "no payload"
    return TypeError(f"{verb}({event}, {payload!r}): this event carries {wanted}, not {type(payload).__name__}")


def _emit_through_hook(engine: Emitter, plan: Plan, payload: Any, seq: int) -> None:
    """For engines whose class overrides `_fire_event`: it sees every event, with ignite's own arguments."""
    before, engine._in_flight = engine._in_flight, (plan, payload, seq)
    name = LEGACY_FIELDS.get(getattr(plan.event, "key", ""))
    try:
        if name == "error":
            engine._fire_event(plan.event, payload.error)
        elif name == "iter_counter":
            engine._fire_event(plan.event, iter_counter=payload.iter_counter)
        else:
            engine._fire_event(plan.event)
    finally:
        engine._in_flight = before
