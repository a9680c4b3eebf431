"""What a run knows about itself."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ignite.engine.events import State as IgniteState

from pulsetrain.engine.events.names import EventLike
from pulsetrain.engine.events.registry import EventRegistry
from pulsetrain.engine.named_values import NamedValues

__all__ = ["State"]


class State(IgniteState):
    """What a run knows: ignite's attributes, the counters of our events, and why the run ended.

    >>> from pulsetrain.engine import Engine
    >>> state = Engine(lambda engine, batch: batch * 2).run([1, 2, 3], max_epochs=2)
    >>> state.epoch, state.iteration, state.output, state.stop_reason
    (2, 6, 6, None)
    """

    __slots__ = ("_engine",)
    epoch: int
    iteration: int
    batch: Any
    output: Any
    metrics: dict[str, Any]
    samples: int  # that a training run has seen; other engines have no such counters
    tokens: int
    stop_reason: str | None
    update: int
    validation_round: int
    rollout_round: int
    save: int

    def __init__(self, engine: EventRegistry | None = None, **attributes: object) -> None:
        self._engine = weakref.ref(engine) if engine is not None else None
        self.stop_reason = None
        self.update = self.validation_round = self.rollout_round = self.save = 0
        super().__init__(**attributes)
        self.metrics = NamedValues(self.metrics)

    if TYPE_CHECKING:  # counters of custom events, and what users keep here

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def owner(self) -> EventRegistry | None:
        """The engine that this is the state of; None if it is not an engine's state."""
        engine = self._engine() if self._engine is not None else None
        return engine if engine is not None and engine.state is self else None

    def get_event_attrib_value(self, event_name: EventLike) -> int:  # ignite's own signature
        """The value of the counter that the event's filters read.

        Raises:
            RuntimeError: the event has no counter on this engine.
        """
        engine = self._engine() if self._engine is not None else None
        counter = engine.counter_of(event_name) if engine is not None else None
        if counter is None:
            raise RuntimeError(f"Unknown event name '{event_name}'")
        return int(getattr(self, counter))
