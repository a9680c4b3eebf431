"""The bus: one blinker signal per event, ordered receivers, one total order over all engines that share it."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Generator, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

import blinker
from blinker.base import ANY_ID
from ignite.engine.events import EventsList

from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.events.compiled import Dispatch, Sequence
from pulsetrain.engine.events.handler_signature import Handler, HandlerSignature, bind
from pulsetrain.engine.events.ignite import signatures_of
from pulsetrain.engine.events.names import COUNTERS, EventLike, Events, identify, value_of
from pulsetrain.engine.events.registry import EventRegistry
from pulsetrain.engine.events.subscription import OnError, Options, Order, Phase, Subscription

__all__ = ["EventBus", "EventSignal"]


class EventSignal(blinker.NamedSignal):
    """A blinker signal whose receivers are ordered by phase, then by registration."""

    def __init__(self, name: str, event: EventLike) -> None:
        super().__init__(name)
        self.event = event
        self._muted = 0
        self._plain: dict[Hashable, Subscription] = {}  # the subscriptions that call plain blinker receivers
        self._compiled: dict[int, weakref.ref[Dispatch]] = {}

    # a property, since blinker assigns is_muted and what was compiled has to follow
    @property
    def is_muted(self) -> bool:
        """Whether the receivers are silenced."""
        return self._muted > 0

    @is_muted.setter
    def is_muted(self, value: bool) -> None:
        self._muted = int(value)
        if hasattr(self, "_compiled"):  # blinker's constructor assigns it, too
            self.rebuild()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Silence every receiver of the event, of every engine, until the block ends; blocks may be nested."""
        self._muted += 1
        self.rebuild()
        try:
            yield
        finally:
            self._muted -= 1
            self.rebuild()

    def connect(self, receiver: Any, sender: Any = blinker.ANY, weak: bool = True) -> Any:  # blinker's own signature
        """As blinker documents; a plain receiver runs in phase ACT and is called as (sender, event=Event)."""
        connected = super().connect(receiver, sender, weak)
        if not isinstance(receiver, Subscription):
            for receiver_id, held in self.receivers.items():
                if not isinstance(held, Subscription):
                    self._plain_subscription(receiver_id, held)  # now, because this fixes its position in the order
        self.rebuild()
        return connected

    def _disconnect(self, receiver_id: object, sender_id: object) -> None:
        super()._disconnect(receiver_id, sender_id)
        if receiver_id not in self.receivers:
            self._plain.pop(receiver_id, None)
        self.rebuild()

    def forget_sender(self, sender_id: int) -> None:
        """Drop the receivers of a dead engine, which blinker itself would keep."""
        self._compiled.pop(sender_id, None)
        self._by_sender.pop(sender_id, None)  # blinker's own clean-up may have run first, so look at every receiver
        for receiver_id, senders in [*self._by_receiver.items()]:
            senders.discard(sender_id)
            if not senders:
                super()._disconnect(receiver_id, ANY_ID)
                self._plain.pop(receiver_id, None)

    def subscriptions(self, sender_id: int, *, exclusive: bool = False) -> list[Subscription]:
        """The sender's subscriptions in order; `exclusive` leaves out those to all engines, and plain receivers."""
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

    def listeners(self, sender_id: int) -> list[tuple[Subscription, Handler]]:
        """Who hears the sender, even while the event is muted: the subscriptions, and for each what it calls."""
        found: list[tuple[Subscription, Handler]] = []
        for receiver_id, receiver in self.receivers.items():
            if not self._by_receiver[receiver_id] & {sender_id, ANY_ID}:
                continue
            if isinstance(receiver, Subscription):
                found.append((receiver, receiver.handler))
            else:
                target = receiver() if isinstance(receiver, weakref.ref) else receiver
                if target is not None:
                    found.append((self._plain_subscription(receiver_id, receiver), target))
        return found

    def receivers_for(self, sender: object) -> Generator[Handler, None, None]:
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

    def compile(self, sender_id: int, compiled: Dispatch) -> None:
        """Compile the sender's subscriptions, and again whenever they change."""
        self._compiled[sender_id] = weakref.ref(compiled)
        compiled.rebuild(self.subscriptions(sender_id))

    def patch(self, subscription: Subscription) -> None:
        """Replace the subscription's callable everywhere, also where the event is being fired."""
        for reference in self._compiled.values():
            if (compiled := reference()) is not None:
                compiled.patch(subscription)

    def rebuild(self) -> None:
        """Compile the subscriptions again after a change."""
        for sender_id, reference in list(self._compiled.items()):
            compiled = reference()
            if compiled is None:
                del self._compiled[sender_id]
            else:
                compiled.rebuild(self.subscriptions(sender_id))

    def _plain_subscription(self, receiver_id: Hashable, receiver: Handler | weakref.ref[Handler]) -> Subscription:
        if receiver_id not in self._plain:
            if isinstance(receiver, weakref.ref):

                def deliver(sender: object, event: object) -> object:
                    target = receiver()
                    return target(sender, event=event) if target is not None else None

            else:

                def deliver(sender: object, event: object) -> object:
                    return receiver(sender, event=event)

            target = receiver() if isinstance(receiver, weakref.ref) else receiver
            deliver.__module__ = getattr(target, "__module__", "")  # what an error's note names
            deliver.__qualname__ = getattr(target, "__qualname__", type(target).__name__)
            self._plain[receiver_id] = Subscription(self, deliver, (), {}, signature=HandlerSignature(event=True))
        return self._plain[receiver_id]


class EventBus(blinker.Namespace):
    """Connects engines with their handlers. Engines that share a bus share one order of events.

    A bus belongs to one thread; other threads use `engine.post`.

    >>> from pulsetrain.engine import Engine, EventBus, Events
    >>> bus = EventBus()
    >>> trainer, evaluator = Engine(lambda e, b: None, name="a", bus=bus), Engine(lambda e, b: None, name="b", bus=bus)
    >>> subscription = bus.subscribe(Events.EPOCH_COMPLETED, lambda engine, event: print(engine.name, event.seq))
    >>> state = trainer.run([0]), evaluator.run([0])
    a 7
    b 15
    >>> subscription.cancel()
    """

    def __init__(self) -> None:
        super().__init__()
        self.sequence: Sequence = Sequence()
        self._engines: dict[int, weakref.ref[object]] = {}
        self._by_key: dict[str, EventSignal] = {}

    # Namespace is a dict, of which an empty one is falsy and equals every other
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
    def engines(self) -> list[Any]:  # of Engine, which is above this module
        """The living engines of this bus, in the order in which they joined."""
        return [engine for reference in self._engines.values() if (engine := reference()) is not None]

    def continue_after(self, seq: int) -> None:
        """Number the next event above `seq`, for example after the last event of an existing log.

        >>> bus = EventBus()
        >>> bus.continue_after(100)
        >>> bus.sequence.last
        100
        >>> bus.continue_after(7)  # the numbers never decrease
        >>> bus.sequence.last
        100
        """
        self.sequence.last = max(self.sequence.last, seq)

    def signal(self, event: EventLike, doc: str | None = None) -> EventSignal:
        """The blinker signal of the event; the same one at each call."""
        key, event = identify(event)
        signal = self._by_key.get(key)
        if signal is None:
            name = value_of(event)
            signal = self._by_key[key] = self[key] = EventSignal(name, event)
            if doc:
                signal.__doc__ = doc
        return signal

    def subscribe(
        self,
        event: EventLike,
        handler: Handler,
        *args: object,
        sender: EventRegistry | None = None,
        phase: Phase = Phase.ACT,
        order: Order | None = None,
        on_error: OnError = "raise",
        passive: bool = False,
        **kwargs: object,
    ) -> Subscription:
        """Call the handler when the event fires on `sender`, or on any engine of the bus if that is None.

        The bus holds the handler until `cancel()`. The handler only observes exceptions: one registered with
        `engine.on` may handle them.

        Args:
            event: an event, filtered or not.
            handler: any callable; see `Engine.add_event_handler`.
            args: passed to the handler.
            sender: the engine.
            phase: when it runs within the event.
            order: FIRST or LAST to run before or after the other handlers of the phase, which run in the order of
                their registration.
            on_error: "raise" or "warn"; see `Engine.add_event_handler`.
            passive: see the event only when it is fired in any case: `engine.hears(event)` stays false, so nobody
                computes a payload for this handler.
            kwargs: passed to the handler.

        Raises:
            ValueError: no form of call fits the handler, or a filter is on an event without a counter.
            TypeError: the event is not an event, or the sender not an engine of this bus.
        """
        if isinstance(event, EventsList):
            raise TypeError(f"subscribe({event!r}): one event per subscription; call it for each of the joined events")
        if sender is not None and not any(sender is engine for engine in self.engines):
            names = ", ".join(repr(engine.name) for engine in self.engines) or "none yet"
            raise ArgumentTypeError(f"needs an engine of this bus, which has {names}", "subscribe", sender=sender)
        event_filter = getattr(event, "filter", None)
        if event_filter is not None:
            _, member = identify(event)
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
            passive=passive,
        )

    def connect_handler(
        self,
        event: EventLike,
        handler: Handler,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        sender: EventRegistry | None,
        **options: Unpack[Options],
    ) -> Subscription:
        """Register a handler of an event that was checked before; `Engine.on` and `subscribe` end here."""
        signal = self.signal(event)
        if not callable(handler):
            raise TypeError(f"{signal.name}: handler={handler!r}: needs a callable")
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
            raise TypeError(f"{signal.name}: handler={handler!r}: coroutine functions are not awaited; pass a function")
        signature = bind(handler, signal.event, args, kwargs, signatures_of(signal.event))
        subscription = Subscription(signal, handler, args, kwargs, signature=signature, **options)
        signal.connect(subscription, sender=blinker.ANY if sender is None else sender, weak=False)
        return subscription

    def join(self, engine: EventRegistry, name: str | None) -> str:
        """Add an engine; returns the name that its events carry: the first of "engine", "engine_2" ... that is free.

        Raises:
            ValueError: a living engine of this bus has the name already.
        """
        taken = {other.name for other in self.engines}
        if name is None:
            name = next(
                n for n in itertools.chain(["engine"], (f"engine_{i}" for i in itertools.count(2))) if n not in taken
            )
        elif name in taken:
            raise ConfigurationError("this bus has an engine of that name; choose another", "Engine", name=name)
        sender_id = id(engine)
        forget = weakref.WeakMethod(self._forget)  # weakly, so that no cycle keeps the bus until the next collection

        def died(_: object) -> None:
            if (living := forget()) is not None:
                living(sender_id)

        self._engines[sender_id] = weakref.ref(engine, died)
        return name

    def _forget(self, sender_id: int) -> None:
        self._engines.pop(sender_id, None)
        for signal in list(self._by_key.values()):
            signal.forget_sender(sender_id)
