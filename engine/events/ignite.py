"""What exists for pytorch-ignite alone: its handlers' arguments, its handles, and its table of handlers.

Ignite's profilers read and edit `engine._event_handlers` in place; here it is a live view of the bus, and edits go to
the subscriptions, also while an event is being fired.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import replace
from typing import Any, Protocol, SupportsIndex, TypeAlias

from ignite.engine.events import RemovableEventHandle

from pulsetrain.engine.events.handler_signature import STANDARD, Handler, HandlerSignature, bind
from pulsetrain.engine.events.names import EventLike, Events, identify
from pulsetrain.engine.events.subscription import Phase, Signal, Subscription

__all__ = [
    "Handle", "HandlerTable", "arguments_of", "calls", "payload_of", "reading_loss", "signatures_of", "wrapped",
]  # fmt: skip

# The payload's field that ignite passes to handlers of these events, and whether it does so by keyword.
_PASSED = {Events.EXCEPTION_RAISED.key: ("error", False), Events.TERMINATE_SINGLE_EPOCH.key: ("iter_counter", True)}


def signatures_of(event: EventLike) -> Sequence[HandlerSignature]:
    """The ways in which a handler of the event may be called, the preferred first."""
    field, by_keyword = _PASSED.get(identify(event)[0], ("", False))
    if not field:
        return STANDARD
    return [
        HandlerSignature(engine=engine, field=field, by_keyword=named)
        for named in ((True, False) if by_keyword else (False,))
        for engine in (True, False)
    ]


def arguments_of(event: EventLike, payload: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """What ignite's `_fire_event` passes after the event."""
    field, by_keyword = _PASSED.get(identify(event)[0], ("", False))
    if not field:
        return (), {}
    value = getattr(payload, field)
    return ((), {field: value}) if by_keyword else ((value,), {})


def payload_of(event: EventLike, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """The payload made from what was passed to ignite's `_fire_event` after the event; None for nothing.

    Raises:
        TypeError: the event carries no payload.
    """
    values = [*args, *kwargs.values()]
    if not values:
        return None
    payload_type = getattr(event, "payload_type", None)
    if payload_type is None:
        raise TypeError(f"{event}: carries no payload, but was fired with {values}")
    return payload_type(**{next(iter(payload_type.__dataclass_fields__)): values[0]})


def reading_loss(handler: Handler) -> None:
    """Let a metric of one number, such as RunningAverage, read the loss of outputs that are mappings with a "loss".

    A Trainer's outputs are such mappings. Ignite's metrics of one number raise a TypeError for any mapping.

    Args:
        handler: any; it concerns the `iteration_completed` of a metric whose `required_output_keys` are None.
    """
    metric = getattr(handler, "__self__", None)
    if metric is None or getattr(metric, "required_output_keys", ()) is not None:
        return
    transform = getattr(metric, "_output_transform", None)
    if callable(transform) and not isinstance(transform, _LossOfMapping):
        metric._output_transform = _LossOfMapping(transform)


class _LossOfMapping:
    """An output_transform whose result, if it is a mapping with a "loss", is replaced by that loss."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, output: Any) -> Any:
        found = self.transform(output)
        return found["loss"] if isinstance(found, Mapping) and "loss" in found else found


class Handle(RemovableEventHandle):
    """What registering a handler returns: `remove()` (or `cancel()`, or `with`) undoes this registration only.

    It refers weakly: it keeps neither the engine nor the handler alive.

    >>> from pulsetrain.engine import Engine, Events
    >>> engine = Engine(lambda engine, batch: None)
    >>> with engine.add_event_handler(Events.STARTED, lambda: print("started")):
    ...     state = engine.run([0])
    started
    >>> engine.hears(Events.STARTED)
    False
    """

    handler: Callable[[], Handler | None]  # type: ignore[assignment]  # not everything can be referred to weakly

    def __init__(self, event: Any, handler: Handler, engine: Any, subscriptions: list[Subscription]) -> None:
        try:
            super().__init__(event, handler, engine)
        except TypeError:  # a callable that cannot be referred to weakly
            super().__init__(event, type(handler), engine)
            self.handler = lambda: handler  # called in the same way
        self._subscriptions = [weakref.ref(subscription) for subscription in subscriptions]

    def remove(self) -> None:
        """Stop calling the handler; removing again does nothing."""
        for reference in self._subscriptions:
            if (subscription := reference()) is not None:
                subscription.cancel()
        self._subscriptions.clear()

    cancel = remove


class _ConnectingSignal(Signal, Protocol):
    def connect(self, receiver: Subscription, sender: Any, weak: bool) -> object: ...

    def patch(self, subscription: Subscription) -> None: ...


class _Bus(Protocol):
    def signal(self, event: EventLike) -> _ConnectingSignal: ...


class _Engine(Protocol):
    """What the table needs of an engine; dispatch, above this file, implements it."""

    @property
    def bus(self) -> _Bus: ...
    @property
    def registered_events(self) -> tuple[EventLike, ...]: ...

    def own_subscriptions(self, event_name: EventLike | None = None) -> list[Subscription]: ...

    def counter_value(self, event: EventLike) -> int: ...


Entry: TypeAlias = tuple[Handler, tuple[Any, ...], Mapping[str, object]]


class HandlerTable(MutableMapping[EventLike, list[Entry]]):
    """event -> list of (handler, args, kwargs), where a handler that takes the engine has a reference to it first."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine

    def __getitem__(self, event: EventLike) -> list[Entry]:
        return _Entries(self._engine, event)

    def __setitem__(self, event: EventLike, entries: list[Entry]) -> None:
        _Entries(self._engine, event).replace_all(entries)

    def __delitem__(self, event: EventLike) -> None:
        _Entries(self._engine, event).replace_all([])

    def __iter__(self) -> Iterator[EventLike]:
        return (event for event in self._engine.registered_events if event in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, event: Any) -> bool:
        return bool(self._engine.own_subscriptions(event))


def wrapped(subscription: Subscription, engine: _Engine) -> Handler:
    """A filtered handler as ignite shows it: a function that applies the filter, with the handler as `_parent`."""
    if subscription.wrapper is None:
        handler = subscription.handler
        reference, event = weakref.ref(engine), subscription.signal.event

        @functools.wraps(handler)
        def wrapper(*args: object, **kwargs: object) -> object:
            alive, due = reference(), subscription.own_filter
            if alive is not None and due is not None and due(alive, alive.counter_value(event)):
                return handler(*args, **kwargs)
            return None

        vars(wrapper)["_parent"] = _parent_of(handler)  # ignite looks for the handler there
        subscription.wrapper = wrapper
    return subscription.wrapper


def calls(subscription: Subscription, handler: Handler) -> bool:
    """Whether the subscription calls the handler, directly or through the function that applies its filter."""
    mine = subscription.handler
    parent = getattr(mine, "_parent", None)
    if parent is not None:
        mine = parent()
    return bool(mine == handler) or (subscription.wrapper is not None and subscription.wrapper is handler)


def _parent_of(handler: Handler) -> Callable[[], Handler | None]:
    try:
        return weakref.ref(handler)
    except TypeError:
        return lambda: handler


class _Entries(list[Entry]):
    """One event's handlers in order: a snapshot whose edits change the subscriptions."""

    def __init__(self, engine: _Engine, event: EventLike) -> None:
        self._engine = engine
        self._signal = engine.bus.signal(event)
        self._subscriptions = engine.own_subscriptions(event)
        super().__init__(self._entry(subscription) for subscription in self._subscriptions)

    def _entry(self, subscription: Subscription) -> Entry:
        handler = subscription.handler
        if subscription.filter is not None:
            handler = wrapped(subscription, self._engine)
        first = (weakref.ref(self._engine),) if subscription.signature.engine else ()
        return handler, first + subscription.args, subscription.kwargs

    def __setitem__(self, index: SupportsIndex | slice, entry: Any) -> None:
        if isinstance(index, slice):
            raise TypeError("_event_handlers: assign one entry at a time")
        subscription = self._subscriptions[index]
        handler, args, kwargs = entry
        takes_engine = bool(args) and isinstance(args[0], weakref.ref)
        signature = replace(
            subscription.signature, engine=takes_engine, event=takes_engine and subscription.signature.event
        )
        if subscription.filter is not None and handler is not subscription.wrapper:
            subscription.suspend_filter()  # the new handler calls the wrapper, which applies the filter
        elif subscription.suspended is not None and handler is subscription.wrapper:
            handler = subscription.resume_filter()
        subscription.set_handler(handler, args[1:] if takes_engine else args, kwargs, signature)
        self._signal.patch(subscription)
        super().__setitem__(index, entry)

    def insert(self, index: SupportsIndex, entry: Entry) -> None:
        """Register at this position in the order, whatever the phases around it are."""
        position = index.__index__()
        position = max(position + len(self), 0) if position < 0 else min(position, len(self))
        before = self._subscriptions[position - 1] if position > 0 else None
        after = self._subscriptions[position] if position < len(self) else None
        handler, args, kwargs = entry
        call, signature = handler, HandlerSignature(engine=False)
        if args and isinstance(reference := args[0], weakref.ref):
            args = args[1:]
            if reference() is self._engine:
                signature = bind(handler, self._signal.event, args, kwargs, signatures_of(self._signal.event))
            else:
                call = _with_reference(reference, handler)
        neighbour = before or after
        phase = neighbour.phase if neighbour is not None else Phase.ACT
        subscription = Subscription(self._signal, call, args, kwargs, signature=signature, phase=phase, by_engine=True)
        if after is not None and (before is None or before.phase != after.phase):
            subscription.phase, subscription.position = after.phase, after.position - 0.5
        elif after is not None and before is not None:
            subscription.position = (before.position + after.position) / 2
        self._signal.connect(subscription, sender=self._engine, weak=False)
        self._subscriptions.insert(position, subscription)
        super().insert(position, entry)

    def append(self, entry: Entry) -> None:
        """Register at the end."""
        self.insert(len(self), entry)

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        for subscription in self._subscriptions[index] if isinstance(index, slice) else [self._subscriptions[index]]:
            subscription.cancel()
        del self._subscriptions[index]
        super().__delitem__(index)

    # a list's own methods would change the snapshot only
    extend = MutableSequence.extend
    pop = MutableSequence.pop  # type: ignore[assignment]  # a list's takes an index, this one an int
    remove = MutableSequence.remove
    clear = MutableSequence.clear
    __iadd__ = MutableSequence.__iadd__

    def replace_all(self, entries: list[Entry]) -> None:
        """Keep what is still in `entries`, drop the rest, add what is new."""
        kept = [entry for entry in entries if any(entry is mine for mine in self)]
        for index in reversed(range(len(self))):
            if not any(self[index] is entry for entry in kept):
                del self[index]
        for entry in entries:
            if not any(entry is mine for mine in kept):
                self.append(entry)


def _with_reference(reference: weakref.ref[object], handler: Handler) -> Handler:
    def call(*args: object, **kwargs: object) -> object:
        engine = reference()
        if engine is None:
            raise RuntimeError("Engine reference not resolved. Cannot execute event handler.")
        return handler(engine, *args, **kwargs)

    return call
