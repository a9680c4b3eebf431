"""When a Checkpointer saves, alone or at the same iteration as other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from pulsetrain.engine import Events, Every, Phase
from pulsetrain.engine.distributed.pulse import SharedFlag
from pulsetrain.engine.events.filters import AfterSeconds
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.cadence import reading_events
from pulsetrain.handlers.checkpointing.save_interval import SaveInterval

__all__ = ["SaveCadence"]

_Due: TypeAlias = Callable[[Any, int], bool]


class SaveCadence:
    """The iterations after which a save is due.

    Args:
        every: the cadence; "auto": by `SaveInterval`.
        writing: whether a save is being written in the background.
        clock: seconds, never running backwards; for "auto".
    """

    def __init__(self, every: Every | Literal["auto"], writing: Callable[[], bool], clock: Callable[[], float]) -> None:
        self.every: Every | Literal["auto"] = every
        self._writing, self._clock = writing, clock
        self._interval: SaveInterval | None = None

    @property
    def is_timed(self) -> bool:
        """Whether the clock decides, which differs from process to process."""
        return self.every == "auto" or self.every.seconds is not None

    def subscribe(
        self,
        subscribe: Attachment,
        save: Callable[..., object],
        flag: SharedFlag | None = None,
        *,
        is_main: bool = True,
    ) -> None:
        """Call `save` whenever one is due.

        Args:
            subscribe: of the handler, which is being attached.
            save: takes the engine and the event.
            flag: of processes that save together: the clock of the main one raises it. None for a process alone.
            is_main: whether this is the main process.
        """
        every = self.every
        if isinstance(every, Every) and (flag is None or every.seconds is None):
            subscribe(reading_events(every), save, phase=Phase.PERSIST)
            return
        due = _Timed(self._time_filter() if is_main or flag is None else None, flag)
        subscribe(Events.ITERATION_COMPLETED(event_filter=due), save, phase=Phase.PERSIST)
        if isinstance(every, Every) and every != Every(seconds=every.seconds):
            subscribe(reading_events(replace(every, seconds=None)), save, phase=Phase.PERSIST)

    def _time_filter(self) -> _Due:
        if isinstance(self.every, Every):
            assert self.every.seconds is not None
            return AfterSeconds(self.every.seconds, time.monotonic)
        # below the promised 3.5%: the cost of a save is known only after it, and deleting older ones is not in it
        self._interval = SaveInterval(self._writing, clock=self._clock, share=0.02)
        return self._interval.is_due

    def saved(self, seconds: float) -> None:
        """A save was made, or begun in the background, and blocked the training thread for this time."""
        if self._interval is not None:
            self._interval.saved(seconds)

    def failed(self) -> None:
        """The last save failed."""
        if self._interval is not None:
            self._interval.failed()


class _Timed:
    """Due by the clock; with a flag, at the next iteration at which that is up in all processes.

    What the handler fires then is observed, since its moment depends on the clock: see `Engine.fire`.
    """

    is_timed = True

    def __init__(self, due: _Due | None, flag: SharedFlag | None) -> None:
        self._due, self._flag = due, flag

    def __call__(self, engine: object, iteration: int) -> bool:
        is_due = self._due is not None and self._due(engine, iteration)
        if self._flag is None:
            return is_due
        if self._flag.take():
            return True
        if is_due:
            self._flag.raise_it()
        return False
