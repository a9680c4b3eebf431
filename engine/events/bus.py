"""The bus: one blinker signal an event, ordered receivers, one total order over every engine that shares it."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import blinker
from blinker.base import ANY_ID
from ignite.engine.events import EventsList

from pulsetrain.engine.events.dispatch import Plan, Sequence
from pulsetrain.engine.events.handler_signature import Shape, bind
from pulsetrain.engine.events.names import COUNTERS, EventFilter, Events, canonical, event_key
from pulsetrain.engine.events.subscription import OnError, Order, Phase, Subscription

__all__ = ["EventBus", "EventSignal"]


class EventSignal(blinker.NamedSignal):
    """A blinker signal whose receivers are ordered by phase, then by registration, and compiled into plans."""

    def __init__(self, name: str, event: Any) -> None:
        super().__init__(name)
        self.event = event
        self._muted = 0
        self._plain: dict[Any, Subscription] = {}  # how plain receivers are called
        self._plans: dict[int, weakref.ref[Plan]] = {}

    # blinker assigns is_muted; the plans have to follow
    @property
    def is_muted(self) -> bool:
        """Whether the receivers are silenced."""
        return self._muted > 0

    @is_muted.setter
    def is_muted(self, value: bool) -> None:
        self._muted = int(value)
        if hasattr(self, "_plans"):
            self._rebuild()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Silence every receiver of the event, of every engine, until the block ends; nests."""
        self._muted += 1
        self._rebuild()
        try:
            yield
        finally:
            self._muted -= 1
            self._rebuild()

    def connect(self, receiver: Any, sender: Any = blinker.ANY, weak: bool = True) -> Any:
        """As blinker documents; a plain receiver runs in phase ACT and is called as (sender, event=Event)."""
        connected = super().connect(receiver, sender, weak)
        if not isinstance(receiver, Subscription):
            for receiver_id, held in self.receivers.items():
                if not isinstance(held, Subscription):
                    self._plain_subscription(receiver_id, held)  # now: this is its place in the order
        self._rebuild()
        return connected

    def _disconnect(self, receiver_id: Any, sender_id: Any) -> None:
        super()._disconnect(receiver_id, sender_id)
        if receiver_id not in self.receivers:
            self._plain.pop(receiver_id, None)
        self._rebuild()

    def forget_sender(self, sender_id: int) -> None:
        """Drop what only a dead engine could have fired: blinker itself would keep the receivers."""
        self._plans.pop(sender_id, None)
        self._by_sender.pop(sender_id, None)  # blinker's own clean-up may have come first: look at every receiver
        for receiver_id, senders in [*self._by_receiver.items()]:
            senders.discard(sender_id)
            if not senders:
                super()._disconnect(receiver_id, ANY_ID)
                self._plain.pop(receiver_id, None)

    def reorder(self) -> None:
        """Follow a changed position or handler of a subscription."""
        self._rebuild()

    def subscriptions(self, sender_id: int, *, exclusive: bool = False) -> list[Subscription]:
        """What the sender's event reaches, in order; `exclusive` leaves out what hears every engine."""
        if self._muted and not exclusive:
            return []
        found = []
        for receiver_id, receiver in self.receivers.items():
            senders = self._by_receiver[receiver_id]
            if sender_id in senders or (ANY_ID in senders and not exclusive):
                if isinstance(receiver, Subscription):
                    found.append(receiver)
                elif not exclusive:
                    found.append(self._plain_subscription(receiver_id, receiver))
        found.sort(key=lambda subscription: (subscription.phase, subscription.order, subscription.position))
        return found

    def receivers_for(self, sender: Any) -> Generator[Callable[..., Any], None, None]:
        """The receivers that `send` calls, in order."""
        plain = {subscription: receiver_id for receiver_id, subscription in self._plain.items()}
        for subscription in self.subscriptions(id(sender)):
            if subscription not in plain:
                yield subscription
                continue
            receiver = self.receivers.get(plain[subscription])
            if isinstance(receiver, weakref.ref):
                receiver = receiver()
            if receiver is not None:
                yield receiver

    def watch(self, sender_id: int, plan: Plan) -> None:
        """Keep the plan compiled."""
        self._plans[sender_id] = weakref.ref(plan)
        plan.rebuild(self.subscriptions(sender_id))

    def patch(self, subscription: Subscription) -> None:
        """Replace the subscription's callable in every plan, firings under way included."""
        for reference in self._plans.values():
            plan = reference()
            if plan is not None:
                plan.calls.patch(subscription)
                if plan.quiet is not plan.calls:
                    plan.quiet.patch(subscription)

    def _rebuild(self) -> None:
        for sender_id, reference in list(self._plans.items()):
            plan = reference()
            if plan is None:
                del self._plans[sender_id]
            else:
                plan.rebuild(self.subscriptions(sender_id))

    def _plain_subscription(self, receiver_id: Any, receiver: Any) -> Subscription:
        if receiver_id not in self._plain:
            if isinstance(receiver, weakref.ref):

                def deliver(sender: Any, event: Any) -> Any:
                    target = receiver()
                    return target(sender, event=event) if target is not None else None

            else:

                def deliver(sender: Any, event: Any) -> Any:
                    return receiver(sender, event=event)

            target = receiver() if isinstance(receiver, weakref.ref) else receiver
            deliver.__module__ = getattr(target, "__module__", "")  # what an error's note names
            deliver.__qualname__ = getattr(target, "__qualname__", type(target).__name__)
            self._plain[receiver_id] = Subscription(self, deliver, (), {}, shape=Shape.EVENT)
        return self._plain[receiver_id]


class EventBus(blinker.Namespace):
    """Where engines fire and receivers listen; several engines may share one and then share one order of events.

    A bus belongs to one thread; from others, `engine.post`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sequence = Sequence()
        self.by_clock = False  # what is fired now hangs on the clock or on another thread: its moment is not repeated
        self._engines: dict[int, weakref.ref[Any]] = {}
        self._by_key: dict[str, EventSignal] = {}

    # Namespace is a dict: an empty one is falsy and equals every other, a bus is neither
    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = object.__hash__  # type: ignore[assignment]  # a dict has none

    def __repr__(self) -> str:
        return f"<EventBus of {', '.join(engine.name for engine in self.engines) or 'no engine'}>"

    @property
    def engines(self) -> list[Any]:
        """The living engines of this bus, in the order in which they joined."""
        return [engine for reference in self._engines.values() if (engine := reference()) is not None]

    def continue_after(self, seq: int) -> None:
        """Number the next event seq + 1, to continue a recorded order."""
        self.sequence.last = seq

    def signal(self, event: Any, doc: str | None = None) -> EventSignal:
        """The blinker signal of the event; the same one at each call."""
        event = canonical(event)
        key = event_key(event)
        signal = self._by_key.get(key)
        if signal is None:
            name = event if isinstance(event, str) else event._value_
            signal = self._by_key[key] = self[key] = EventSignal(name, event)
            if doc:
                signal.__doc__ = doc
        return signal

    def subscribe(
        self,
        event: Any,
        handler: Callable[..., Any],
        *args: Any,
        sender: Any = None,
        phase: Phase = Phase.ACT,
        order: Order | None = None,
        on_error: OnError = "raise",
        **kwargs: Any,
    ) -> Subscription:
        """Call the handler when the event fires on `sender`, or on any engine of the bus when that is None.

        It holds the handler until `cancel()`, and only observes exceptions: `engine.on` may take one. `order` is FIRST
        or LAST to run before or after the other handlers of the phase; else they run as they were registered.

        Raises:
            ValueError: the handler's signature fits nothing, or a filter is on an event without a counter.
            TypeError: the event is no event.
        """
        if isinstance(event, EventsList):
            raise TypeError(f"subscribe({event!r}): one event a subscription; call it for each of the joined ones")
        if sender is not None and not any(sender is engine for engine in self.engines):
            raise TypeError(
                f"subscribe(sender={sender!r}): needs an engine of this bus, which has "
                f"{', '.join(repr(engine.name) for engine in self.engines) or 'none yet'}"
            )
        event_filter = getattr(event, "filter", None)
        if event_filter is not None:
            member = canonical(event)
            if isinstance(member, Events) and member not in COUNTERS:
                raise ValueError(f"{event}: a filter needs a counter, and this event has none")
            for engine in self.engines if sender is None else [sender]:
                if sender is not None or engine.has_registered_events(event):
                    engine.require_counter(event)
        return self.connect_handler(
            event,
            handler,
            args,
            kwargs,
            event_filter=event_filter,
            sender=sender,
            phase=phase,
            order=order,
            on_error=on_error,
        )

    def connect_handler(
        self,
        event: Any,
        handler: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        event_filter: EventFilter | Callable[..., bool] | None,
        sender: Any,
        phase: Phase,
        order: Order | None = None,
        on_error: OnError,
        by_engine: bool = False,
    ) -> Subscription:
        """Register a checked event's handler; `Engine.on` and `subscribe` end here."""
        signal = self.signal(event)
        if not callable(handler):
            raise TypeError(f"{signal.name}: handler={handler!r}: needs a callable")
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
            raise TypeError(f"{signal.name}: handler={handler!r}: coroutine functions are not awaited; pass a function")
        subscription = Subscription(
            signal,
            handler,
            args,
            kwargs,
            shape=bind(handler, signal.event, args, kwargs),
            event_filter=event_filter,
            phase=phase,
            order=order,
            on_error=on_error,
            by_engine=by_engine,
        )
        signal.connect(subscription, sender=blinker.ANY if sender is None else sender, weak=False)
        return subscription

    def join(self, engine: Any, name: str | None) -> str:
        """Add an engine; returns the name that its events carry.

        Raises:
            ValueError: a living engine of this bus has the name already.
        """
        taken = {other.name for other in self.engines}
        if name is None:
            name = next(
                n for n in itertools.chain(["engine"], (f"engine_{i}" for i in itertools.count(2))) if n not in taken
            )
        elif name in taken:
            raise ValueError(f"Engine(name={name!r}): this bus has an engine of that name; choose another")
        sender_id = id(engine)
        bus = weakref.ref(self)

        def forget(_: object) -> None:
            if (living := bus()) is not None:
                living._engines.pop(sender_id, None)
                for signal in list(living._by_key.values()):
                    signal.forget_sender(sender_id)

        self._engines[sender_id] = weakref.ref(engine, forget)
        return name
