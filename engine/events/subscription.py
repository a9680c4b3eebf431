"""A handler on an event: when it runs, whether it is due, what its failure means, and how it is cancelled."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MethodType
from typing import Literal, Protocol, TypedDict

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.filters import EventFilter, Filter
from pulsetrain.engine.events.handler_signature import Handler, HandlerSignature
from pulsetrain.engine.events.names import Event, EventLike, Events
from pulsetrain.engine.events.payloads import HandlerFailed
from pulsetrain.engine.events.registry import EventRegistry
from pulsetrain.engine.logs import get_logger

__all__ = ["FIRST", "LAST", "OnError", "Options", "Order", "Phase", "Signal", "Subscription"]

OnError = Literal["raise", "warn"]
_serial = itertools.count(1)


class Phase(IntEnum):
    """When a handler runs within an event: metrics are computed, policies act, loggers observe, checkpoints persist.

    >>> Phase.COMPUTE < Phase.ACT < Phase.OBSERVE < Phase.PERSIST
    True
    """

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


class Signal(Protocol):
    """What a subscription needs of the signal that holds it."""

    name: str
    event: EventLike

    def disconnect(self, receiver: Subscription) -> None:
        """Drop the receiver."""

    def rebuild(self) -> None:
        """Follow a changed filter or position."""


class Options(TypedDict, total=False):
    """How a handler is subscribed; see `EventBus.subscribe` and `Engine.add_event_handler`."""

    event_filter: Filter | None
    phase: Phase
    order: Order | None
    on_error: OnError
    passive: bool
    by_engine: bool


class Subscription:
    """One handler on one event of one engine, or of all engines of a bus, until `cancel()` or the end of a `with`.

    It is also the blinker receiver that the signal holds: called with (sender, event=Event), it calls the handler.

    >>> from pulsetrain.engine import Engine, Events
    >>> engine = Engine(lambda engine, batch: batch)
    >>> with engine.bus.subscribe(Events.ITERATION_COMPLETED, lambda engine: print(engine.state.output)):
    ...     state = engine.run(["a", "b"])
    a
    b
    >>> engine.hears(Events.ITERATION_COMPLETED)
    False
    """

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    signature: HandlerSignature
    call: Callable[..., object]
    needs_event: bool

    def __init__(
        self,
        signal: Signal,
        handler: Handler,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        signature: HandlerSignature,
        event_filter: Filter | None = None,
        phase: Phase = Phase.ACT,
        order: Order | None = None,
        on_error: OnError = "raise",
        passive: bool = False,
        by_engine: bool = False,
    ) -> None:
        if on_error not in ("raise", "warn"):
            raise ConfigurationError("choose 'raise' or 'warn'", on_error=on_error)
        self.signal = signal
        try:
            self.phase: Phase = Phase(phase)
        except ValueError:
            choices = ", ".join(f"Phase.{each.name}" for each in Phase)
            raise ValueError(f"{signal.name}: phase={phase!r}: choose {choices}") from None
        self.on_error = on_error
        self.passive = passive
        self.by_engine = by_engine  # registered with engine.on: may handle an exception of the run
        self.failures = 0
        self.serial: int = next(_serial)
        self.order: Order = Order.REGISTERED if order is None else order
        self.position: float = self.serial  # among those of its phase and order
        self.filter = event_filter
        self.observed: bool = getattr(event_filter, "is_timed", False) is True
        self.suspended: tuple[Filter | None, Handler] | None = None
        # by engine, since a subscription on a bus may follow several: its run and the counter's value
        self.fired_once: weakref.WeakKeyDictionary[EventRegistry, tuple[int, int]] | None = None
        self.wrapper: Handler | None = None
        self.set_handler(handler, args, kwargs, signature)

    def set_handler(
        self, handler: Handler, args: tuple[object, ...], kwargs: Mapping[str, object], signature: HandlerSignature
    ) -> None:
        """Call a different handler from now on, at the same position in the order."""
        self.handler = handler
        self.args, self.kwargs, self.signature = args, kwargs, signature
        self.call, self.needs_event = signature.compile(handler, args, kwargs)
        if self.on_error == "warn":
            self.call = self._guarded(self.call)

    @property
    def description(self) -> str:
        """The handler's name, for messages."""
        handler = self.handler
        if isinstance(handler, MethodType):  # the method may be inherited: the object's class says more
            owner = handler.__self__ if isinstance(handler.__self__, type) else type(handler.__self__)
            return f"{_public_name(owner)}.{handler.__name__}"
        name: str = getattr(handler, "__qualname__", type(handler).__name__)
        module = getattr(handler, "__module__", None)
        return f"{module}.{name}" if module else name

    def is_due(self, engine: EventRegistry, value: int) -> bool:
        """Whether the filter passes the event at this value of its counter."""
        assert self.filter is not None
        if not self.filter(engine, value):
            return False
        if isinstance(self.filter, EventFilter) and self.filter.once:
            # the counter may keep its value between two firings, but `once` means once in a run
            now = (engine.run_number, value)
            if self.fired_once is None:
                self.fired_once = weakref.WeakKeyDictionary()
            if self.fired_once.get(engine) == now:
                return False
            self.fired_once[engine] = now
        return True

    @property
    def own_filter(self) -> Filter | None:
        """The filter, also while the handler applies it: see `suspend_filter`."""
        return self.filter if self.suspended is None else self.suspended[0]

    def refilter(self, event_filter: Filter) -> None:
        """Choose at which values of the event's counter the handler is due from now on."""
        if self.suspended is not None:  # `resume_filter` puts it in place
            self.suspended = (event_filter, self.suspended[1])
            return
        self.filter = event_filter
        self.signal.rebuild()

    def suspend_filter(self) -> None:
        """Let the handler apply the filter: a profiler has replaced it by one that calls the filtering wrapper."""
        self.suspended = (self.filter, self.handler)
        self.filter = None
        self.signal.rebuild()

    def resume_filter(self) -> Handler:
        """Undo `suspend_filter`; returns the handler that was there before."""
        assert self.suspended is not None
        (self.filter, handler), self.suspended = self.suspended, None
        self.signal.rebuild()
        return handler

    def cancel(self) -> None:
        """Stop calling the handler; if the event is being fired, it still runs once. Cancelling again does nothing."""
        self.signal.disconnect(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    def __call__(self, sender: EventRegistry, event: Event | None = None) -> object:
        """Call the handler; this is what `signal.send(engine, event=...)` of blinker calls."""
        return self.call(sender, event) if self.needs_event else self.call(sender)

    def _guarded(self, call: Callable[..., object]) -> Callable[..., object]:
        def guarded(engine: EventRegistry, *event: Event) -> object:
            try:
                return call(engine, *event)
            except Exception as error:
                self.failures += 1
                self._report(engine, error)
                return None

        return guarded

    def _report(self, engine: EventRegistry, error: Exception) -> None:
        if self.failures == 1:
            get_logger("engine").warning(
                "handler failed; the run continues, and further failures are only counted",
                handler=self.description,
                on=self.signal.name,
                error=f"{type(error).__name__}: {error}",
                exc_info=None if isinstance(error, OSError) else error,  # a full disk is not a bug: no traceback
            )
        if self.signal.event != Events.HANDLER_FAILED:
            engine.fire(
                Events.HANDLER_FAILED, HandlerFailed(handler=self.description, event=self.signal.name, error=error)
            )


def _public_name(kind: type) -> str:
    """The name by which users import a class: of the nearest package that exports it, else of its own module."""
    package = kind.__module__
    while package := package.rpartition(".")[0]:
        if getattr(sys.modules.get(package), "__dict__", {}).get(kind.__name__) is kind:
            return f"{package}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"
