"""How a handler is called: decided once, from its signature, when it is registered."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

from pulsetrain.engine.events.names import Events

__all__ = ["Shape", "bind"]

# What pytorch-ignite passes to handlers of these events before their own arguments: the payload's field of this name.
# Ignite passes iter_counter by keyword, the exception by position.
LEGACY_FIELDS = {Events.EXCEPTION_RAISED.key: "error", Events.TERMINATE_SINGLE_EPOCH.key: "iter_counter"}


class Shape(Enum):
    """What comes before the handler's own arguments."""

    EVENT = "(engine, event, *args)"
    ENGINE = "(engine, *args)"
    BARE = "(*args)"
    ENGINE_ERROR = "(engine, error, *args)"
    ERROR = "(error, *args)"
    ENGINE_COUNT = "(engine, *args, iter_counter=n)"
    COUNT = "(*args, iter_counter=n)"
    ENGINE_COUNT_FIRST = "(engine, n, *args)"
    COUNT_FIRST = "(n, *args)"

    def compile(
        self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], bool]:
        """A callable taking (engine) or, where the second value is true, (engine, event)."""
        match self:
            case Shape.ENGINE if not args and not kwargs:
                return f, False  # no frame between the loop and the handler
            case Shape.BARE if not args and not kwargs:
                return lambda _: f(), False
            case Shape.ENGINE:
                return lambda engine: f(engine, *args, **kwargs), False
            case Shape.BARE:
                return lambda _: f(*args, **kwargs), False
            case Shape.EVENT if not args and not kwargs:
                return f, True
            case Shape.EVENT:
                return lambda engine, event: f(engine, event, *args, **kwargs), True
            case Shape.ENGINE_ERROR:
                return lambda engine, event: f(engine, event.payload.error, *args, **kwargs), True
            case Shape.ERROR:
                return lambda _, event: f(event.payload.error, *args, **kwargs), True
            case Shape.ENGINE_COUNT:
                return lambda engine, event: f(
                    engine, *args, **{"iter_counter": event.payload.iter_counter, **kwargs}
                ), True
            case Shape.COUNT:
                return lambda _, event: f(*args, **{"iter_counter": event.payload.iter_counter, **kwargs}), True
            case Shape.ENGINE_COUNT_FIRST:
                return lambda engine, event: f(engine, event.payload.iter_counter, *args, **kwargs), True
            case Shape.COUNT_FIRST:
                return lambda _, event: f(event.payload.iter_counter, *args, **kwargs), True


def bind(handler: Callable[..., Any], event: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shape:
    """How to call the handler.

    (engine, event, *args) if its second parameter is named `event` and has no default; else (engine, *args) if that
    binds; else (*args). A first parameter that has a default is never filled with the engine.

    Raises:
        ValueError: nothing binds, or the callable does not tell its signature.
    """
    try:
        signature = inspect.signature(handler)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{event}: handler={handler!r}: has no readable signature ({error}); wrap it in a function"
        ) from None
    positional = [
        p
        for p in signature.parameters.values()
        if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    engine_fits = not positional or positional[0].default is inspect.Parameter.empty
    asks_event = (
        len(positional) >= 2 and positional[1].name == "event" and positional[1].default is inspect.Parameter.empty
    )
    reason = ""  # the text, not the error: its traceback would keep the caller's frames, and the engine, alive

    def binds(*first: Any, **extra: Any) -> bool:
        nonlocal reason
        try:
            signature.bind(*first, *args, **{**extra, **kwargs})
        except TypeError as error:
            reason = str(error)
            return False
        return True

    if asks_event and engine_fits and "event" not in kwargs and binds(None, None):
        return Shape.EVENT
    legacy = LEGACY_FIELDS.get(getattr(event, "key", ""))
    tries: list[tuple[Shape, tuple[Any, ...], dict[str, Any]]]
    if legacy == "error":
        tries = [(Shape.ENGINE_ERROR, (None, None), {}), (Shape.ERROR, (None,), {})]
    elif legacy == "iter_counter":
        named = {"iter_counter": 0}
        tries = [
            (Shape.ENGINE_COUNT, (None,), named),
            (Shape.COUNT, (), named),
            (Shape.ENGINE_COUNT_FIRST, (None, 0), {}),
            (Shape.COUNT_FIRST, (0,), {}),
        ]
    else:
        tries = [(Shape.ENGINE, (None,), {}), (Shape.BARE, (), {})]
    for shape, first, extra in tries:
        if shape.name.startswith("ENGINE") and not engine_fits:
            continue
        if binds(*first, **extra):
            return shape
    raise ValueError(
        f"Error adding {handler!r} 'handler' to {event}: takes parameters {list(signature.parameters)} but will be "
        f"called with {' or '.join(shape.value for shape, _, _ in tries)}, args={args}, kwargs={kwargs} "
        f"({reason}); change the handler's parameters or the arguments given with it; to get the event's record, name "
        "the second parameter `event`"
    )
