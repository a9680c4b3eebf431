"""Python's garbage collection at points of the run where it disturbs nobody."""

from __future__ import annotations

import gc
from typing import Any, Self

from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.subscription import FIRST, Phase
from pulsetrain.engine.recording.replay.engine import ReplayedEngine
from pulsetrain.handlers.attachment.attachment import Attachment

__all__ = ["Garbage"]


class Garbage:
    """Switches the automatic collection off while the engine runs, and collects at a cadence instead.

    The automatic one comes in the middle of a step, and in a distributed run at another step on each process, for which
    all the others wait. What is there at the start is frozen: no collection looks at it again. However the run ends,
    and on `detach()`, the collector is as it was before; while an interrupted run pauses it stays off.

    Memory that only the collector frees, of objects that refer to each other, is held from one occasion to the next.

    Args:
        every: when to collect; joined by `|` where one cadence is not enough.
        generation: up to which one; 2 is everything.

    Raises:
        TypeError: the cadence is no Every.
        ConfigurationError: there is no such generation.
    """

    def __init__(self, every: Every | None = None, generation: int = 2) -> None:
        self.every = Every(epochs=1) if every is None else every
        if not isinstance(self.every, Every):
            raise TypeError(f"Garbage(every={every!r}): needs an Every, such as Every(iterations=1000)")
        if not isinstance(generation, int) or isinstance(generation, bool) or not 0 <= generation <= 2:
            raise ConfigurationError(f"Garbage(generation={generation!r}): needs 0, 1 or 2")
        self.generation = generation
        self._was_enabled = False
        self._freezes = False  # what is frozen is ours
        self._active = False
        self._attachment = Attachment("Garbage")

    def attach(self, engine: Engine) -> Self:
        """Collect behind loggers and checkpoints of the same event, in phase PERSIST.

        Raises:
            RecordingError: the engine is a replay.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            if isinstance(engine, ReplayedEngine):
                raise RecordingError(
                    f"Replay: {engine.name!r} makes no steps whose garbage Garbage could collect: an event log is no "
                    "process; attach it in training"
                )
            subscribe(Events.STARTED, self._begin, phase=Phase.PERSIST)
            subscribe(self.every.events(), self._collect, phase=Phase.PERSIST)
            subscribe(Events.COMPLETED, self._end, phase=Phase.PERSIST)
            subscribe(Events.TERMINATE, self._end_without_completed, phase=Phase.PERSIST)
            # first of all: another handler may raise in turn
            subscribe(Events.EXCEPTION_RAISED, self._end_failing, phase=Phase.COMPUTE, order=FIRST)
        return self

    def detach(self) -> None:
        """Collect no more; the collector is as it was."""
        self._attachment.cancel()
        self._end()

    def _begin(self) -> None:
        if self._active:  # a paused run was given up for this one
            return
        self._active, self._was_enabled = True, gc.isenabled()
        self._freezes = gc.get_freeze_count() == 0  # else somebody else's would be unfrozen with ours
        gc.disable()
        gc.collect()
        if self._freezes:
            gc.freeze()

    def _collect(self) -> None:
        if self._active:
            gc.collect(self.generation)

    def _end_without_completed(self, engine: Any) -> None:
        if engine.should_terminate == "skip_completed":
            self._end()

    def _end_failing(self, error: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        if not self._active:
            return
        self._active = False
        if self._freezes:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
