"""Which other handlers hear an engine."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["hearing"]

Kind = TypeVar("Kind")


def hearing(engine: Any, event: Any, kind: type[Kind]) -> list[Kind]:
    """The handlers of this class with a method that hears the event of the engine, in order, each once."""
    found: dict[int, Kind] = {}
    for subscription in engine.bus.signal(event).subscriptions(id(engine)):
        owner = getattr(subscription.handler, "__self__", None)
        if isinstance(owner, kind):
            found[id(owner)] = owner
    return list(found.values())
