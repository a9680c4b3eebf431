"""What a run knows while it runs."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ignite.engine.events import State as IgniteState

if TYPE_CHECKING:
    from pulsetrain.engine.events.engine_events import Emitter

__all__ = ["State"]


class State(IgniteState):
    """What a run knows: ignite's attributes, the counters of our events, and why the run ended."""

    __slots__ = ("_engine",)
    stop_reason: str | None
    update: int
    validation_round: int
    rollout_round: int
    save: int

    def __init__(self, engine: Emitter | None = None, **attributes: Any) -> None:
        self._engine = weakref.ref(engine) if engine is not None else None
        self.stop_reason = None
        self.update = self.validation_round = self.rollout_round = self.save = 0
        super().__init__(**attributes)

    def get_event_attrib_value(self, event_name: Any) -> int:
        """The value of the counter that the event's filters read.

        Raises:
            RuntimeError: the event has no counter on this engine.
        """
        engine = self._engine() if self._engine is not None else None
        counter = engine.counter_of(event_name) if engine is not None else None
        if counter is None:
            raise RuntimeError(f"Unknown event name '{event_name}'")
        return int(getattr(self, counter))
