"""A handler on an event: when it runs, whether it is due, what its failing means, and how it is taken off again."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from enum import IntEnum
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

from ignite.engine.events import RemovableEventHandle

from pulsetrain.engine.events.cadence import AfterSeconds
from pulsetrain.engine.events.handler_signature import Shape
from pulsetrain.engine.events.names import EventFilter, Events
from pulsetrain.engine.events.payloads import HandlerFailed
from pulsetrain.engine.logs import get_logger

if TYPE_CHECKING:
    from pulsetrain.engine.events.bus import EventSignal
    from pulsetrain.engine.events.engine_events import Emitter
    from pulsetrain.engine.events.names import Event

__all__ = ["FIRST", "LAST", "Handle", "OnError", "Order", "Phase", "Subscription"]

OnError = Literal["raise", "warn"]
_serial = itertools.count(1)


class Phase(IntEnum):
    """When a handler runs within an event: metrics are computed, policies act, loggers observe, checkpoints persist."""

    COMPUTE = 0
    ACT = 1
    OBSERVE = 2
    PERSIST = 3


class Order(IntEnum):
    """Where a handler runs within its phase. Handlers of one order run in the order of their registration."""

    FIRST = -1
    REGISTERED = 0
    LAST = 1


FIRST, LAST = Order.FIRST, Order.LAST


class Subscription:
    """One handler on one event of one engine, or of all engines of a bus. `cancel()` undoes it; so does `with`.

    It is also the blinker receiver that the signal holds: called with (sender, event=Event), it calls the handler.
    """

    __slots__ = (
        "__weakref__",
        "args",
        "by_engine",
        "call",
        "failures",
        "filter",
        "fired_once",
        "handler",
        "kwargs",
        "on_error",
        "order",
        "phase",
        "position",
        "serial",
        "shape",
        "signal",
        "suspended",
        "wants_event",
        "wrapper",
    )

    def __init__(
        self,
        signal: EventSignal,
        handler: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        shape: Shape,
        event_filter: EventFilter | Callable[..., bool] | None = None,
        phase: Phase = Phase.ACT,
        order: Order | None = None,
        on_error: OnError = "raise",
        by_engine: bool = False,
    ) -> None:
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error={on_error!r}: choose 'raise' or 'warn'")
        self.signal = signal
        try:
            self.phase = Phase(phase)
        except ValueError:
            choices = ", ".join(f"Phase.{each.name}" for each in Phase)
            raise ValueError(f"{signal.name}: phase={phase!r}: choose {choices}") from None
        self.on_error = on_error
        self.by_engine = by_engine  # registered with engine.on: may take an exception of the run
        self.failures = 0
        self.serial = next(_serial)
        self.order = Order.REGISTERED if order is None else order
        self.position: float = self.serial  # among those of its phase and order
        self.filter = event_filter
        self.suspended: tuple[Any, Callable[..., Any]] | None = None
        # by engine, since a bus's subscription may hear several: its run and the value
        self.fired_once: weakref.WeakKeyDictionary[Emitter, tuple[int, int]] | None = None
        self.wrapper: Callable[..., Any] | None = None
        self.set_handler(handler, args, kwargs, shape)

    def set_handler(
        self, handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], shape: Shape
    ) -> None:
        """Call something else from now on, in the same place."""
        self.handler = handler
        self.args, self.kwargs, self.shape = args, kwargs, shape
        self.call, self.wants_event = shape.compile(handler, args, kwargs)
        if self.on_error == "warn":
            self.call = self._guarded(self.call)
        if isinstance(self.filter, AfterSeconds):
            self.call = _by_clock(self.call)

    @property
    def description(self) -> str:
        """The handler's name, for messages."""
        handler = self.handler
        if isinstance(handler, MethodType):  # perhaps inherited: the object's class says whose it is
            owner = handler.__self__ if isinstance(handler.__self__, type) else type(handler.__self__)
            return f"{owner.__module__}.{owner.__qualname__}.{handler.__name__}"
        name: str = getattr(handler, "__qualname__", type(handler).__name__)
        module = getattr(handler, "__module__", None)
        return f"{module}.{name}" if module else name

    def is_due(self, engine: Emitter) -> bool:
        """Whether the filter lets the event through, by the counter as it stands now."""
        assert self.filter is not None
        value = engine.counter_value(self.signal.event)
        if not self.filter(engine, value):
            return False
        if isinstance(self.filter, EventFilter) and self.filter.once:
            # the counter can stand still between two firings: once is once in a run
            now = (engine.run_number, value)
            if self.fired_once is None:
                self.fired_once = weakref.WeakKeyDictionary()
            if self.fired_once.get(engine) == now:
                return False
            self.fired_once[engine] = now
        return True

    def is_handler(self, handler: Callable[..., Any]) -> bool:
        """Whether this calls the handler, itself or through the function that asks its filter."""
        mine = self.handler
        if hasattr(mine, "_parent"):
            mine = mine._parent()
        return bool(mine == handler) or (self.wrapper is not None and self.wrapper is handler)

    def suspend_filter(self) -> None:
        """Let the handler ask the filter: what a profiler puts in place calls the function that does."""
        self.suspended = (self.filter, self.handler)
        self.filter = None
        self.signal.reorder()

    def resume_filter(self) -> Callable[..., Any]:
        """Undo `suspend_filter`; returns the handler that was there."""
        assert self.suspended is not None
        (self.filter, handler), self.suspended = self.suspended, None
        self.signal.reorder()
        return handler

    def cancel(self) -> None:
        """Stop hearing the event; a firing under way still reaches the handler once. Cancelling twice is once."""
        self.signal.disconnect(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    def __call__(self, sender: Any, event: Event | None = None) -> Any:
        """The receiver's side of blinker: what `signal.send(engine, event=...)` calls."""
        return self.call(sender, event) if self.wants_event else self.call(sender)

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(engine: Emitter, *event: Any) -> Any:
            try:
                return call(engine, *event)
            except Exception as error:
                self.failures += 1
                self._report(engine, error)
                return None

        return guarded

    def _report(self, engine: Emitter, error: Exception) -> None:
        if self.failures == 1:
            get_logger("engine").warning(
                "handler failed; the run goes on, further failures are counted",
                handler=self.description,
                on=self.signal.name,
                error=f"{type(error).__name__}: {error}",
                exc_info=None if isinstance(error, OSError) else error,  # a full disk is nobody's code
            )
        if self.signal.event != Events.HANDLER_FAILED:
            engine.fire(
                Events.HANDLER_FAILED,
                HandlerFailed(handler=self.description, event=self.signal.name, error=error),
            )


class Handle(RemovableEventHandle):
    """What registering returns: `remove()` (or `cancel()`, or `with`) undoes this registration and no other.

    It refers weakly: it keeps neither the engine nor the handler alive.
    """

    def __init__(self, event: Any, handler: Callable[..., Any], engine: Any, subscriptions: list[Subscription]) -> None:
        try:
            super().__init__(event, handler, engine)
        except TypeError:  # a callable that cannot be referred to weakly
            super().__init__(event, type(handler), engine)
            self.handler = lambda: handler  # type: ignore[assignment]  # called alike
        self._subscriptions = [weakref.ref(subscription) for subscription in subscriptions]

    def remove(self) -> None:
        """Stop hearing the events; removing twice is once."""
        for reference in self._subscriptions:
            if (subscription := reference()) is not None:
                subscription.cancel()
        self._subscriptions.clear()

    cancel = remove


def _by_clock(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with all that is fired in it marked as hanging on the clock."""

    def called(engine: Emitter, *event: Any) -> None:
        bus, before = engine.bus, engine.bus.by_clock
        bus.by_clock = True
        try:
            call(engine, *event)
        finally:
            bus.by_clock = before

    return called
