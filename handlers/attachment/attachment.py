"""The subscriptions of one handler: made together, cancelled together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Self

from pulsetrain.engine.argument_checks import answer_unknown_keywords
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import EventsList, EventType
from pulsetrain.engine.events.subscription import FIRST, LAST, OnError, Order, Phase, Subscription
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.attachment.familiar_names import remedies_for

__all__ = ["AnyEvent", "Attachment", "Handler", "subscribe_first", "subscribe_last"]

AnyEvent = str | EventType | EventsList


class Attachment:
    """Holds the subscriptions of one handler to one engine or bus.

    It subscribes to the bus, so that a handler of EXCEPTION_RAISED observes the exception and does not swallow it. It
    does not keep the engine alive.

    Args:
        place: the handler's class name, for messages.

    >>> from pulsetrain.engine import Engine, Events
    >>> engine, attachment = Engine(lambda engine, batch: batch), Attachment("Greeter")
    >>> with attachment.to(engine) as subscribe:
    ...     subscribe(Events.STARTED | Events.COMPLETED, lambda engine, event: print(event.type))
    >>> state = engine.run([1, 2])
    started
    completed
    >>> attachment.cancel()
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._subscriptions: list[Subscription] = []
        self._bus: EventBus | None = None
        self._sender: weakref.ref[Engine] | None = None
        self._name = ""

    @contextmanager
    def to(self, target: Engine | EventBus, *, whole_bus: bool = True, needed: bool = True) -> Iterator[Self]:
        """Attach in a `with` block, which yields this object: called, it subscribes.

        If the block fails, nothing stays subscribed.

        Args:
            target: an engine, or a bus for all its engines.
            whole_bus: whether the handler accepts a bus.
            needed: whether a folder that cannot be written is an error. If not, a warning is logged and the run
                continues without the handler, which is not attached.

        Raises:
            RuntimeError: already attached.
            TypeError: the target is not an engine (or bus).
        """
        if self._bus is not None:
            raise RuntimeError(f"{self._place}.attach(): already attached to {self._name}; detach() first")
        if isinstance(target, EventBus):
            if not whole_bus:
                raise TypeError(f"{self._place}.attach({target!r}): needs an Engine of this package")
            self._bus, self._sender, self._name = target, None, repr(target)
        elif isinstance(getattr(target, "bus", None), EventBus):  # an engine, or an object that acts as one
            self._bus, self._sender, self._name = target.bus, weakref.ref(target), repr(target.name)
        else:
            wanted = "an Engine or an EventBus" if whole_bus else "an Engine"
            raise TypeError(f"{self._place}.attach({target!r}): needs {wanted} of this package")
        try:
            yield self
        except BaseException as error:
            self.cancel()
            if needed or not (isinstance(error, RunFolderError) and isinstance(error.__cause__, OSError)):
                raise
            get_logger("handlers").warning(f"the run continues without {self._place}", reason=str(error))

    @property
    def bus(self) -> EventBus | None:
        """The bus attached to, or None."""
        return self._bus

    @property
    def follows_whole_bus(self) -> bool:
        """Whether the handler was attached to a bus, not to one engine."""
        return self._bus is not None and self._sender is None

    def subscribe(
        self,
        event: AnyEvent,
        handler: Callable[..., object],
        *,
        phase: Phase = Phase.OBSERVE,
        on_error: OnError = "raise",
        order: Order | None = None,
        passive: bool = False,
    ) -> None:
        """Subscribe the handler to an event, with or without a filter, or to each of several joined by `|`.

        Args:
            event: the event or events.
            handler: called with as much of (engine, event) as its signature takes.
            phase: when, within the event.
            on_error: "raise" or "warn".
            order: FIRST or LAST in the phase; by default after the handlers that are registered already.
            passive: see the event only when it is fired in any case; see `EventBus.subscribe`.
        """
        assert self._bus is not None, "subscribe() outside attach()"
        sender = self._sender() if self._sender is not None else None
        for one in event if isinstance(event, EventsList) else (event,):
            self._subscriptions.append(
                self._bus.subscribe(
                    one, handler, sender=sender, phase=phase, order=order, on_error=on_error, passive=passive
                )
            )

    __call__ = subscribe

    def cancel(self) -> None:
        """Cancel every subscription; may be called twice."""
        for subscription in self._subscriptions:
            subscription.cancel()
        self._subscriptions.clear()
        self._bus = self._sender = None


class Handler:
    """Base class of handlers that are attached to one engine or bus at a time.

    A keyword that a handler's __init__ does not have is answered with the nearest that it has; a name from another
    framework, with what to write in place of it.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            answer_unknown_keywords(cls, remedies_for(cls))

    @cached_property
    def _attachment(self) -> Attachment:
        return Attachment(type(self).__name__)

    def detach(self) -> None:
        """Unsubscribe from every event."""
        self._attachment.cancel()


def subscribe_first(subscribe: Attachment, event: AnyEvent, handler: Callable[..., object]) -> None:
    """Subscribe before all other handlers of the event, to measure it; errors become warnings."""
    subscribe(event, handler, phase=Phase.COMPUTE, on_error="warn", order=FIRST)


def subscribe_last(subscribe: Attachment, event: AnyEvent, handler: Callable[..., object]) -> None:
    """Subscribe after all other handlers of the event, to measure it; errors become warnings."""
    subscribe(event, handler, phase=Phase.PERSIST, on_error="warn", order=LAST)
