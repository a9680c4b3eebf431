"""Whether a run ends where it says that it has."""

from __future__ import annotations

from typing import Any

from pulsetrain.engine.events.names import Event, Events

__all__ = ["ends_here"]


def ends_here(engine: Any, event: Event) -> bool:
    """At COMPLETED, TERMINATE or another end: whether nothing of the run comes behind it.

    Behind TERMINATE comes COMPLETED, perhaps with a last validation, unless it is left out; and a trainer that goes
    back to a checkpoint goes on from there.
    """
    if getattr(engine, "rewinding", None) is not None:
        return False
    return event.type != Events.TERMINATE.value or engine.should_terminate == "skip_completed"
