"""Runs Python's garbage collection at a cadence, not in the middle of steps."""

from __future__ import annotations

import gc
from typing import Self

from pulsetrain.engine import FIRST, ConfigurationError, Engine, Event, Events, Every, Phase
from pulsetrain.engine.argument_checks import is_whole
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.cadence import check_every
from pulsetrain.handlers.attachment.engine_queries import reject_replay

__all__ = ["Garbage"]


class Garbage(Handler):
    """Disables automatic collection while the engine runs, and collects at a cadence instead.

    Automatic collection happens in the middle of a step, and in a distributed run at a different step on each process,
    while all the others wait. Objects that exist at the start are frozen, so that no collection visits them. When the
    run ends, in whatever way, and on `detach()`, the collector is restored; while an interrupted run is paused, it
    stays off.

    Memory that only the collector can free, of objects that refer to each other, is held until the next collection.

    Args:
        every: when to collect; several cadences may be joined by `|`.
        generation: up to which generation to collect; 2 is everything.

    Raises:
        TypeError: the cadence is not an Every.
        ConfigurationError: there is no such generation.

    >>> engine = Engine(lambda engine, batch: gc.isenabled())
    >>> garbage = Garbage(Every(iterations=100)).attach(engine)
    >>> engine.run([1]).output, gc.isenabled()
    (False, True)
    """

    def __init__(self, every: Every | None = None, generation: int = 2) -> None:
        self.every: Every = Every(epochs=1) if every is None else every
        check_every("Garbage", self.every, "Every(iterations=1000)")
        if not is_whole(generation) or not 0 <= generation <= 2:
            raise ConfigurationError("needs 0, 1 or 2", "Garbage", generation=generation)
        self.generation = generation
        self._was_enabled = False
        self._freezes = False  # whether this handler froze the objects
        self._active = False

    def attach(self, engine: Engine) -> Self:
        """Collect after loggers and checkpoints of the same event, in phase PERSIST.

        Raises:
            RecordingError: the engine is a replay.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            reject_replay("Garbage", engine, "process that trains")
            subscribe(Events.STARTED, self._begin, phase=Phase.PERSIST)
            subscribe(self.every.events(), self._collect, phase=Phase.PERSIST)
            subscribe(Events.COMPLETED | Events.TERMINATE, self._on_end, phase=Phase.PERSIST)
            # before other handlers, which may raise in turn
            subscribe(Events.EXCEPTION_RAISED, self._on_end, phase=Phase.COMPUTE, order=FIRST)
        return self

    def detach(self) -> None:
        """Stop collecting; the collector is restored."""
        super().detach()
        self._end()

    def _begin(self) -> None:
        if self._active:  # a paused run was abandoned for this one
            return
        self._active, self._was_enabled = True, gc.isenabled()
        self._freezes = gc.get_freeze_count() == 0  # otherwise objects that others froze would be unfrozen too
        gc.disable()
        gc.collect()
        if self._freezes:
            gc.freeze()

    def _collect(self) -> None:
        if self._active:
            gc.collect(self.generation)

    def _on_end(self, engine: Engine, event: Event) -> None:
        if (
            event.type != Events.TERMINATE.value or engine.should_terminate == "skip_completed"
        ):  # else COMPLETED follows
            self._end()

    def _end(self) -> None:
        if not self._active:
            return
        self._active = False
        if self._freezes:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
