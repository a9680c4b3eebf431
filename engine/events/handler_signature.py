"""How a handler is called: decided once, from its signature and the event, when it is registered."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pulsetrain.engine.events.names import EventLike

__all__ = ["STANDARD", "Handler", "HandlerSignature", "bind"]

Handler: TypeAlias = Callable[..., object]


@dataclass(frozen=True, slots=True)
class HandlerSignature:
    """What a handler is called with besides its own arguments.

    >>> HandlerSignature(engine=False).describe()
    '(*args)'
    >>> call, needs_event = HandlerSignature(engine=False).compile(print, ("hello",), {})
    >>> call("the engine")
    hello
    """

    engine: bool = True
    event: bool = False  # the event's record
    field: str | None = None  # a field of the payload
    by_keyword: bool = False  # the field is passed by its name, after the handler's own arguments

    def describe(self, *, own: bool = True) -> str:
        """The form of the call, for messages.

        Args:
            own: whether the handler has arguments of its own.
        """
        parts = ["engine"] * self.engine + ["event"] * self.event
        if self.field is not None and not self.by_keyword:
            parts.append(self.field)
        parts += ["*args"] * own
        if self.field is not None and self.by_keyword:
            parts.append(f"{self.field}=...")
        return f"({', '.join(parts)})"

    def fits(self, signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
        """Why the handler cannot be called like this; the empty string if it can."""
        first = (None,) * (self.engine + self.event + (self.field is not None and not self.by_keyword))
        named = {self.field: None} if self.field is not None and self.by_keyword else {}
        try:
            signature.bind(*first, *args, **{**named, **kwargs})
        except TypeError as error:  # its text only: its traceback would keep the caller's frames and the engine alive
            return str(error)
        return ""

    def compile(
        self, f: Handler, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[Callable[..., object], bool]:
        """A callable that takes (engine) or, if the second value is true, (engine, event)."""
        field = self.field
        if field is not None:

            def call(engine: object, event: Any) -> object:  # an Event; the field is of its payload
                first = (engine,) if self.engine else ()
                value = getattr(event.payload, field)
                if self.by_keyword:
                    return f(*first, *args, **{field: value, **kwargs})
                return f(*first, value, *args, **kwargs)

            return call, True
        match self.engine, self.event, bool(args or kwargs):
            case True, event, False:
                return f, event  # no frame between the loop and the handler
            case False, _, False:
                return lambda _: f(), False
            case True, True, _:
                return lambda engine, event: f(engine, event, *args, **kwargs), True
            case True, False, _:
                return lambda engine: f(engine, *args, **kwargs), False
            case _:
                return lambda _: f(*args, **kwargs), False


WITH_EVENT = HandlerSignature(event=True)
STANDARD = (HandlerSignature(), HandlerSignature(engine=False))


def bind(
    handler: Handler,
    event: EventLike,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    forms: Sequence[HandlerSignature] = STANDARD,
) -> HandlerSignature:
    """How to call the handler.

    It gets (engine, event, *args) if its second parameter is named `event` and has no default; else the first of the
    forms that fits, by default (engine, *args), then (*args). A first parameter that has a default is never filled
    with the engine.

    Raises:
        ValueError: none fits, or the callable has no readable signature.

    >>> bind(lambda engine, event: None, "started", (), {}).describe()
    '(engine, event, *args)'
    >>> bind(lambda: None, "started", (), {}).describe()
    '(*args)'
    """
    try:
        signature = inspect.signature(handler)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{event}: handler={handler!r}: has no readable signature ({error}); wrap it in a function"
        ) from None
    required = [
        parameter.default is inspect.Parameter.empty
        for parameter in signature.parameters.values()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    engine_fits = not required or required[0]
    asks_for_event = len(required) >= 2 and [*signature.parameters][1] == "event" and required[1]
    gets_event = asks_for_event and engine_fits and "event" not in kwargs
    reason = WITH_EVENT.fits(signature, args, kwargs) if gets_event else ""
    if gets_event and not reason:
        return WITH_EVENT
    for form in forms:
        if form.engine and not engine_fits:
            continue
        misfit = form.fits(signature, args, kwargs)
        if not misfit:
            return form
        reason = reason or misfit  # of the first form, which most handlers have
    hint = "" if gets_event else "; to get the event's record, name the second parameter `event`"
    name = getattr(handler, "__name__", repr(handler))
    called = " or ".join(form.describe(own=bool(args or kwargs)) for form in ((WITH_EVENT,) if gets_event else forms))
    given = (f", args={args}" if args else "") + (f", kwargs={kwargs}" if kwargs else "")
    raise ValueError(
        f"Error adding {name} 'handler' to {event}: takes parameters {list(signature.parameters)} but will be "
        f"called with {called}{given} ({reason}); change the handler's parameters or the arguments given with it{hint}"
    )
