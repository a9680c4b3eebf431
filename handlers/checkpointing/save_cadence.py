"""When a Checkpointer saves, alone or at the same iteration as other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pulsetrain.engine import Events, Every, Phase
from pulsetrain.engine.distributed.pulse import SharedFlag
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.cadence import SharedClock, shared_events
from pulsetrain.handlers.checkpointing.save_interval import SaveInterval

__all__ = ["SaveCadence"]


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
        if isinstance(self.every, Every):
            subscribe(shared_events(self.every, flag, is_main=is_main), save, phase=Phase.PERSIST)
            return
        if is_main or flag is None:
            # below the promised 3.5%: the cost of a save is known only after it, and deleting older ones is not in it
            self._interval = SaveInterval(self._writing, clock=self._clock, share=0.02)
        due = SharedClock(None if self._interval is None else self._interval.is_due, flag)
        subscribe(Events.ITERATION_COMPLETED(event_filter=due), save, phase=Phase.PERSIST)

    def saved(self, seconds: float) -> None:
        """A save was made, or begun in the background, and blocked the training thread for this time."""
        if self._interval is not None:
            self._interval.saved(seconds)

    def failed(self) -> None:
        """The last save failed."""
        if self._interval is not None:
            self._interval.failed()
