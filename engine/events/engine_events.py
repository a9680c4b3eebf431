"""Registering handlers: the side of an engine that its users see, with pytorch-ignite's methods."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType, MethodType
from typing import Any, Protocol, TypeVar, overload

from ignite.engine.events import EventsList

from pulsetrain.engine.errors import ArgumentTypeError
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.dispatch import Dispatcher
from pulsetrain.engine.events.handler_signature import Handler
from pulsetrain.engine.events.ignite import Handle, HandlerTable, calls, reading_loss, wrapped
from pulsetrain.engine.events.names import Event, EventLike, EventType
from pulsetrain.engine.events.payloads import EpochTerminated, ExceptionRaised
from pulsetrain.engine.events.subscription import OnError, Options, Phase

__all__ = ["EngineEvents"]

F = TypeVar("F", bound=Handler)
Sender = TypeVar("Sender")
Result = TypeVar("Result")
Payload = TypeVar("Payload")
Known = TypeVar("Known", covariant=True)


class Attaching(Protocol[Known]):
    """What `on` returns for type checkers, which compare the event's payload with that of the handler's `event`."""

    @overload  # with Any, so that a handler of several events may be decorated several times
    def __call__(self, handler: Callable[[Sender, Event[Known]], Result]) -> Callable[[Sender, Event[Any]], Result]: ...
    @overload
    def __call__(self, handler: Callable[[Sender], Result]) -> Callable[[Sender], Result]: ...
    @overload
    def __call__(self, handler: Callable[[], Result]) -> Callable[[], Result]: ...
    @overload  # handlers of pytorch-ignite take a field of these payloads
    def __call__(self: Attaching[ExceptionRaised] | Attaching[EpochTerminated], handler: F) -> F: ...


class EngineEvents(Dispatcher):
    """The events of one engine: registers handlers on its bus, and fires."""

    def __init__(self, name: str | None, bus: EventBus | None) -> None:
        # never `bus or EventBus()`: an empty blinker namespace is falsy
        super().__init__(EventBus() if bus is None else bus)
        self.run_number = 0  # runs started from iteration 0: `once` means once in each
        self.name: str = self.bus.join(self, name)

    @property
    def _event_handlers(self) -> HandlerTable:
        return HandlerTable(self)  # ignite's profilers edit it in place

    def add_event_handler(
        self,
        event_name: EventLike | EventsList,
        handler: Handler,
        *args: object,
        phase: Phase = Phase.ACT,
        on_error: OnError = "raise",
        **kwargs: object,
    ) -> Handle:
        """Call the handler when the event fires on this engine, until it is removed.

        It is called as (engine, event, *args) if its second parameter is named `event` and has no default, else as
        (engine, *args) if that fits, else as (*args).

        Args:
            event_name: an event, filtered or not, or several joined by `|`.
            handler: any callable.
            args: passed to the handler.
            phase: when it runs within the event: COMPUTE, ACT, OBSERVE or PERSIST. Handlers of one phase run in the
                order of their registration.
            on_error: "raise" ends the run with the handler's error; "warn" logs the first error, counts all of them,
                fires HANDLER_FAILED, and the run continues.
            kwargs: passed to the handler.

        Raises:
            ValueError: the event is not registered here, a filter is on an event without a counter, or no form of call
                fits the handler.
            TypeError: the handler is not callable.

        >>> from pulsetrain.engine import Engine, Events
        >>> engine = Engine(lambda engine, batch: batch ** 2)
        >>> def show(engine, event, text):
        ...     print(text, event.iteration, engine.state.output)
        >>> handle = engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), show, "iteration")
        >>> state = engine.run([1, 2, 3, 4])
        iteration 2 4
        iteration 4 16
        >>> handle.remove()
        """
        events = list(event_name) if isinstance(event_name, EventsList) else [event_name]
        resolved = []
        for event in events:  # all are checked before the first is connected
            _, found = self._require_registered(event)
            event_filter = getattr(event, "filter", None)
            if event_filter is not None:
                self.require_counter(event)
            resolved.append((found, event_filter))
        reading_loss(handler)
        subscriptions = []
        with ExitStack() as undo:  # all of them are connected, or none
            for event, passes in resolved:
                options: Options = {"event_filter": passes, "phase": phase, "on_error": on_error, "by_engine": True}
                connected = self.bus.connect_handler(event, handler, args, kwargs, sender=self, **options)
                subscriptions.append(undo.enter_context(connected))
            undo.pop_all()
        shown = handler
        if not isinstance(event_name, EventsList) and subscriptions[0].filter is not None:
            shown = wrapped(subscriptions[0], self)
        return Handle(event_name, shown, self, subscriptions)

    @overload
    def on(
        self, event_name: EventType[Payload], *, phase: Phase = Phase.ACT, on_error: OnError = "raise"
    ) -> Attaching[Payload]: ...
    @overload
    def on(
        self,
        event_name: EventLike | EventsList,
        *args: object,
        phase: Phase = Phase.ACT,
        on_error: OnError = "raise",
        **kwargs: object,
    ) -> Attaching[Any]: ...
    def on(
        self,
        event_name: EventLike | EventsList,
        *args: object,
        phase: Phase = Phase.ACT,
        on_error: OnError = "raise",
        **kwargs: object,
    ) -> Any:
        """`add_event_handler` as a decorator, which returns the function unchanged.

        Type checkers compare the payload of the handler's `event` parameter with that of the event, where the event is
        a member of `Events`, filtered or not, and the handler has no arguments of its own.

        >>> from pulsetrain.engine import Engine, Events
        >>> engine = Engine(lambda engine, batch: batch)
        >>> @engine.on(Events.EPOCH_COMPLETED)
        ... def report(engine):
        ...     print(f"epoch {engine.state.epoch}: {engine.state.output}")
        >>> state = engine.run([1, 2], max_epochs=2)
        epoch 1: 2
        epoch 2: 2
        """
        if isinstance(event_name, FunctionType | MethodType):
            rule = "needs an event, as in @trainer.on(Events.EPOCH_COMPLETED)"
            raise ArgumentTypeError(rule, f"{type(self).__name__}.on", event_name=event_name)

        def decorate(handler: F) -> F:
            self.add_event_handler(event_name, handler, *args, phase=phase, on_error=on_error, **kwargs)
            return handler

        return decorate

    def has_event_handler(self, handler: Handler, event_name: EventLike | None = None) -> bool:
        """Whether the handler is registered on the event, or on any event."""
        return any(calls(each, handler) for each in self.own_subscriptions(event_name))

    def remove_event_handler(self, handler: Handler, event_name: EventLike) -> None:
        """Undo every registration of the handler on the event; `Handle.remove` undoes one.

        Raises:
            ValueError: it is not registered there.
        """
        mine = [each for each in self.own_subscriptions(event_name) if calls(each, handler)]
        if not mine:
            if not self.own_subscriptions(event_name):
                raise ValueError(f"Input event name '{event_name}' does not exist among the events with handlers")
            raise ValueError(f"Input handler '{handler}' is not found among registered event handlers")
        for subscription in mine:
            subscription.cancel()
