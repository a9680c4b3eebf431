"""Saves while training continues: a snapshot now, written in a thread, announced on the training thread."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pulsetrain.engine import CheckpointSaved, Events, HandlerFailed
from pulsetrain.engine.checkpoint.snapshot import Snapshot
from pulsetrain.engine.events.names import EventType
from pulsetrain.engine.logs import get_logger

__all__ = ["BackgroundSave"]


class BackgroundSave:
    """Writes one save at a time: the next one waits for it, which costs time, not memory.

    The thread fires no event. `settle`, called after each iteration, announces the save or its failure, so that a state
    that is saved later counts it, and nothing is left for the next run. Older checkpoints are deleted after that, in a
    thread as well.

    Args:
        clock: seconds, never running backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.waited: float = 0.0  # seconds that training has waited for saves
        self._clock = clock
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._preparing: threading.Thread | None = None
        self._cleaning: threading.Thread | None = None
        self._cleaning_error: BaseException | None = None
        self._fire: Callable[[EventType, object], object] = lambda event, payload: None
        self._iteration = -1  # of the save in progress
        self._saved: CheckpointSaved | None = None
        self._error: BaseException | None = None
        self._undo: Callable[[], None] = lambda: None
        self._clean: Callable[[CheckpointSaved], None] = lambda saved: None

    @property
    def writing(self) -> bool:
        """Whether a save was begun and is not announced yet."""
        return self._thread is not None

    @property
    def is_prepared(self) -> bool:
        """Whether the memory of the copy is allocated, or about to be."""
        return self._snapshot.nbytes > 0 or self._preparing is not None

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate the memory of a copy of such a state in a thread: else training waits for it at the first save."""
        make = self._snapshot.prepare(state)
        self._preparing = threading.Thread(target=make, name="checkpoint memory")
        self._preparing.start()

    def begin(
        self,
        state: Mapping[str, Any],
        iteration: int,
        write: Callable[[dict[str, Any], Callable[[CheckpointSaved], None]], object],
        fire: Callable[[EventType, object], object],
        undo: Callable[[], None],
        clean: Callable[[CheckpointSaved], None] = lambda saved: None,
    ) -> None:
        """Copy a state, and write the copy in a thread; the previous save must be settled.

        Args:
            state: it may change as soon as this returns.
            iteration: after which it is the state.
            write: called in the thread with the copy, and with a function to call once it is durable.
            fire: called by `settle` with the event that announces what has come of it, and its payload.
            undo: called by `settle` if it never was.
            clean: called in a thread once the save has been announced; deletes older ones.
        """
        assert self._thread is None
        self._finish_cleaning()
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        copy = self._snapshot.copy(state)

        def run() -> None:
            try:
                _lower_priority()
                write(copy, self._durable)
            except BaseException as error:  # `settle` raises it on the training thread
                self._error = error

        self._fire, self._iteration = fire, iteration
        self._undo, self._clean = undo, clean
        # not a daemon thread: an interpreter that exits waits for it
        thread = threading.Thread(target=run, name="checkpoint")
        thread.start()
        self._thread = thread

    def settle(self, *, wait: bool = False, raises: bool = True) -> bool:
        """Fire CHECKPOINT_SAVED for a save that was written, or HANDLER_FAILED for one that failed.

        Args:
            wait: for a save that is still being written.
            raises: whether to raise errors other than OSError; else they are logged as well.

        Returns:
            Whether there was a save and it failed.
        """
        thread = self._thread
        if thread is None or (not wait and thread.is_alive()):
            if wait:
                self._finish_cleaning(raises)
            return False
        if thread.is_alive():
            start = self._clock()
            thread.join()
            seconds = self._clock() - start
            self.waited += seconds
            get_logger("handlers").info(
                "waited for a checkpoint to be written", iteration=self._iteration, seconds=seconds
            )
        thread.join()
        saved, error = self._saved, self._error
        self._thread = self._saved = self._error = None
        if saved is None:
            self._undo()
        else:
            self._fire(Events.CHECKPOINT_SAVED, saved)
            self._cleaning = threading.Thread(target=self._clean_up, args=(saved,), name="checkpoint cleaning")
            self._cleaning.start()
            if wait:
                self._finish_cleaning(raises)
        if error is not None:
            # a full disk costs this checkpoint, not the run; an error after the writing is not a full disk
            if raises and (saved is not None or not isinstance(error, OSError)):
                raise error
            get_logger("handlers").warning(
                "checkpoint not saved; the run and older checkpoints are as they were",
                iteration=self._iteration,
                error=str(error) or type(error).__name__,
            )
            # in place of the event that is missing
            failed = HandlerFailed(
                handler="pulsetrain.handlers.Checkpointer", event=Events.CHECKPOINT_SAVED.value, error=error
            )
            self._fire(Events.HANDLER_FAILED, failed)
        return saved is None

    def release(self) -> None:
        """Free the memory; the last save must be settled."""
        self._snapshot = Snapshot()

    def leave(self) -> None:
        """In a forked process, which has no threads of its parent: forget the save in progress."""
        self._thread = self._preparing = self._cleaning = self._saved = self._error = None

    def _clean_up(self, saved: CheckpointSaved) -> None:
        try:
            self._clean(saved)
        except BaseException as error:  # raised on the training thread
            self._cleaning_error = error

    def _finish_cleaning(self, raises: bool = True) -> None:
        if self._cleaning is None:
            return
        self._cleaning.join()
        error, self._cleaning, self._cleaning_error = self._cleaning_error, None, None
        if error is not None and raises:
            raise error
        if error is not None:
            get_logger("handlers").warning("older checkpoints not deleted", reason=str(error) or type(error).__name__)

    def _durable(self, saved: CheckpointSaved) -> None:
        self._saved = saved


def _lower_priority() -> None:
    """Lower the thread's priority: where training uses every core, writing then slows it a third as much."""
    if sys.platform == "linux":  # only there threads have priorities
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
