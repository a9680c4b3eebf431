"""What a handler has subscribed to: made together, undone together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import EventsList
from pulsetrain.engine.events.subscription import OnError, Order, Phase, Subscription
from pulsetrain.engine.logs import get_logger

__all__ = ["Attachment"]


class Attachment:
    """Holds the subscriptions of one handler to one engine or bus.

    It subscribes at the bus, so that a handler which hears EXCEPTION_RAISED observes the exception and does not take
    it, and it keeps no engine alive.

    Args:
        place: the handler's class name, for messages.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._subscriptions: list[Subscription] = []
        self._bus: EventBus | None = None
        self._sender: weakref.ref[Engine] | None = None
        self._name = ""

    @contextmanager
    def to(
        self, target: Engine | EventBus, *, whole_bus: bool = True, needed: bool = True
    ) -> Iterator[Callable[..., None]]:
        """Attach in a `with` block; yields `subscribe`. Where the block fails, nothing stays subscribed.

        Args:
            target: an engine, or a bus for all its engines.
            whole_bus: whether a bus will do.
            needed: whether a folder that cannot be written is an error; else that is said, and the run goes on without
                the handler, which is not attached.

        Raises:
            RuntimeError: attached already.
            TypeError: the target is no engine (or bus).
        """
        if self._bus is not None:
            raise RuntimeError(f"{self._place}.attach(): already attached to {self._name}; detach() first")
        if isinstance(target, EventBus) and whole_bus:
            self._bus, self._sender, self._name = target, None, repr(target)
        elif isinstance(getattr(target, "bus", None), EventBus):
            engine: Any = target  # or what stands for one: it has a bus
            self._bus, self._sender, self._name = engine.bus, weakref.ref(engine), repr(engine.name)
        else:
            wanted = "an Engine or an EventBus" if whole_bus else "an Engine"
            raise TypeError(f"{self._place}.attach({target!r}): needs {wanted} of this package")
        try:
            yield self.subscribe
        except BaseException as error:
            self.cancel()
            if needed or not (isinstance(error, RunFolderError) and isinstance(error.__cause__, OSError)):
                raise
            get_logger("handlers").warning(f"the run goes on without {self._place}", reason=str(error))

    @property
    def bus(self) -> EventBus | None:
        """The bus attached to, or None."""
        return self._bus

    @property
    def follows_whole_bus(self) -> bool:
        """Whether it was a bus that was attached to."""
        return self._bus is not None and self._sender is None

    def subscribe(
        self,
        event: Any,
        handler: Callable[..., Any],
        *,
        phase: Phase = Phase.OBSERVE,
        on_error: OnError = "raise",
        order: Order | None = None,
    ) -> None:
        """Subscribe the handler to an event, filtered or not, or to each of several joined by `|`.

        Args:
            event: what to subscribe to.
            handler: called as the bus calls any.
            phase: when, within the event.
            on_error: "raise" or "warn".
            order: FIRST or LAST in the phase; by default after the handlers that are registered already.
        """
        assert self._bus is not None, "subscribe() outside attach()"
        sender = self._sender() if self._sender is not None else None
        for one in event if isinstance(event, EventsList) else (event,):
            self._subscriptions.append(
                self._bus.subscribe(one, handler, sender=sender, phase=phase, order=order, on_error=on_error)
            )

    def cancel(self) -> None:
        """Undo every subscription; cancelling twice is once."""
        for subscription in self._subscriptions:
            subscription.cancel()
        self._subscriptions.clear()
        self._bus = self._sender = None
