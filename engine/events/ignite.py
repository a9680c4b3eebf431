"""Pytorch-ignite's `engine._event_handlers`, as a live view of the bus.

Ignite's profilers read and edit that table in place; edits go to the subscriptions, also while an event fires.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from typing import TYPE_CHECKING, Any

from pulsetrain.engine.events.handler_signature import Shape, bind
from pulsetrain.engine.events.names import event_key
from pulsetrain.engine.events.subscription import Phase, Subscription

if TYPE_CHECKING:
    from pulsetrain.engine.events.engine_events import Emitter

__all__ = ["HandlerTable"]

Entry = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_WITHOUT_ENGINE = {
    Shape.EVENT: Shape.BARE,
    Shape.ENGINE: Shape.BARE,
    Shape.ENGINE_ERROR: Shape.ERROR,
    Shape.ENGINE_COUNT: Shape.COUNT,
    Shape.ENGINE_COUNT_FIRST: Shape.COUNT_FIRST,
}
_WITH_ENGINE = {without: shape for shape, without in _WITHOUT_ENGINE.items()}


class HandlerTable(MutableMapping[Any, list[Entry]]):
    """event -> list of (handler, args, kwargs), where a handler that takes the engine has a reference to it first."""

    def __init__(self, engine: Emitter) -> None:
        self._engine = engine

    def __getitem__(self, event: Any) -> list[Entry]:
        return _Entries(self._engine, event)

    def __setitem__(self, event: Any, entries: list[Entry]) -> None:
        _Entries(self._engine, event).replace_all(entries)

    def __delitem__(self, event: Any) -> None:
        _Entries(self._engine, event).replace_all([])

    def __iter__(self) -> Iterator[Any]:
        seen = set()
        for event in self._engine._allowed_events:
            key = event_key(event)
            if key not in seen and self._engine._own_subscriptions(event):
                seen.add(key)
                yield event

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, event: object) -> bool:
        return bool(self._engine._own_subscriptions(event))

    @staticmethod
    def wrapped(subscription: Subscription, engine: Emitter) -> Callable[..., Any]:
        """A filtered handler as ignite shows it: a function that asks the filter, with the handler as `_parent`."""
        if subscription.wrapper is None:
            handler, due = subscription.handler, subscription.filter
            reference, asks = weakref.ref(engine), subscription.signal.event
            held = weakref.ref(subscription)

            @functools.wraps(handler)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                alive = reference()
                if alive is not None and due is not None and due(alive, alive.counter_value(asks)):
                    return handler(*args, **kwargs)
                return None

            wrapper._parent = _parent_of(handler)  # type: ignore[attr-defined]
            wrapper._subscription = held  # type: ignore[attr-defined]
            subscription.wrapper = wrapper
        return subscription.wrapper


def _parent_of(handler: Callable[..., Any]) -> Callable[[], Any]:
    try:
        return weakref.ref(handler)
    except TypeError:
        return lambda: handler


class _Entries(list[Entry]):
    """One event's handlers in order; a snapshot that writes its edits through."""

    def __init__(self, engine: Emitter, event: Any) -> None:
        self._engine = engine
        self._event = engine._resolve(event)
        self._subscriptions = engine._own_subscriptions(event)
        super().__init__(self._entry(subscription) for subscription in self._subscriptions)

    def _entry(self, subscription: Subscription) -> Entry:
        handler = subscription.handler
        if subscription.filter is not None:
            handler = HandlerTable.wrapped(subscription, self._engine)
        first = (weakref.ref(self._engine),) if subscription.shape in _WITHOUT_ENGINE else ()
        return handler, first + subscription.args, subscription.kwargs

    def __setitem__(self, index: Any, entry: Any) -> None:
        if isinstance(index, slice):
            raise TypeError("_event_handlers: assign one entry at a time")
        subscription = self._subscriptions[index]
        handler, args, kwargs = entry
        shape = subscription.shape
        if args[:1] and isinstance(args[0], weakref.ref):
            args, shape = args[1:], _WITH_ENGINE.get(shape, shape)
        else:
            shape = _WITHOUT_ENGINE.get(shape, shape)
        if subscription.filter is not None and handler is not subscription.wrapper:
            subscription.suspend_filter()  # the new handler wraps the one that asks the filter
        elif subscription.suspended is not None and handler is subscription.wrapper:
            handler = subscription.resume_filter()
        subscription.set_handler(handler, args, kwargs, shape)
        subscription.signal.patch(subscription)
        super().__setitem__(index, entry)

    def insert(self, index: Any, entry: Entry) -> None:
        """Register at this place in the order, whatever the phases around it."""
        index = max(index + len(self), 0) if index < 0 else min(index, len(self))
        before = self._subscriptions[index - 1] if index > 0 else None
        after = self._subscriptions[index] if index < len(self) else None
        handler, args, kwargs = entry
        if args[:1] and isinstance(args[0], weakref.ref):
            reference, rest = args[0], args[1:]
            shape, call = Shape.BARE, _with_reference(reference, handler)
            call.__wrapped_handler__ = handler  # type: ignore[attr-defined]
            if reference() is self._engine:
                shape, call = bind(handler, self._event, rest, kwargs), handler
            args = rest
        else:
            shape, call = Shape.BARE, handler
        neighbour = before or after
        subscription = Subscription(
            self._engine.bus.signal(self._event),
            call,
            args,
            kwargs,
            shape=shape,
            phase=neighbour.phase if neighbour is not None else Phase.ACT,
            by_engine=True,
        )
        if after is not None and (before is None or before.phase != after.phase):
            subscription.phase, subscription.position = after.phase, after.position - 0.5
        elif after is not None and before is not None:
            subscription.position = (before.position + after.position) / 2
        subscription.signal.connect(subscription, sender=self._engine, weak=False)
        self._subscriptions.insert(index, subscription)
        super().insert(index, entry)

    def append(self, entry: Entry) -> None:
        """Register at the end."""
        self.insert(len(self), entry)

    def __delitem__(self, index: Any) -> None:
        for subscription in self._subscriptions[index] if isinstance(index, slice) else [self._subscriptions[index]]:
            subscription.cancel()
        del self._subscriptions[index]
        super().__delitem__(index)

    # a list's own would change the snapshot alone
    extend = MutableSequence.extend
    pop = MutableSequence.pop  # type: ignore[assignment]  # it takes an int, a list's an index
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


def _with_reference(reference: weakref.ref[Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        engine = reference()
        if engine is None:
            raise RuntimeError("Engine reference not resolved. Cannot execute event handler.")
        return handler(engine, *args, **kwargs)

    return call
