"""Saving beside the training: a snapshot now, the writing in a thread, what came of it told on the training thread."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pulsetrain.engine import Events
from pulsetrain.engine.checkpoint.snapshot import Snapshot
from pulsetrain.engine.events.payloads import CheckpointSaved, HandlerFailed
from pulsetrain.engine.logs import get_logger

__all__ = ["BackgroundSave"]


class BackgroundSave:
    """At most one save is being written and none waits: the next one waits for it, which costs time, not memory.

    The thread fires nothing. `settle`, asked after each iteration, says what came of it, so that a state taken behind
    it counts it, and nothing is left for the next run.

    Args:
        clock: seconds, never running backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.waited = 0.0  # seconds that training has waited for a save to be written
        self._clock = clock
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._preparing: threading.Thread | None = None
        self._engine: Any = None  # of the save under way
        self._iteration = -1
        self._saved: CheckpointSaved | None = None
        self._error: BaseException | None = None
        self._undo: Callable[[], None] = lambda: None

    @property
    def writing(self) -> bool:
        """Whether a save has been begun and nothing been said of it yet."""
        return self._thread is not None

    def prepare(self, engine: Any) -> None:
        """Make the memory for the first copy beside the training: else the first save keeps it waiting for that."""
        if self._snapshot.nbytes or self._preparing is not None:
            return  # there has been one
        make = self._snapshot.prepare(engine.checkpoint_state())
        self._preparing = threading.Thread(target=make, name="checkpoint memory")
        self._preparing.start()

    def begin(
        self,
        engine: Any,
        write: Callable[[dict[str, Any], Callable[[CheckpointSaved], None]], object],
        undo: Callable[[], None],
    ) -> None:
        """Copy the engine's state, and write the copy in a thread; the save before has been settled.

        Args:
            engine: it may go on as soon as this returns.
            write: called in the thread with the copy, and with what to tell once it is durable.
            undo: called by `settle` where it never was.
        """
        assert self._thread is None
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        copy = self._snapshot.take(engine.checkpoint_state())

        def run() -> None:
            try:
                _step_back()
                write(copy, self._durable)
            except BaseException as error:  # raised on the training thread
                self._error = error

        self._engine, self._iteration, self._undo = engine, engine.state.iteration, undo
        # no daemon: an interpreter that exits waits for it
        thread = threading.Thread(target=run, name="checkpoint")
        thread.start()
        self._thread = thread

    def settle(self, *, wait: bool = False, raises: bool = True) -> bool:
        """Fire CHECKPOINT_SAVED for a save that has been written, or HANDLER_FAILED where it could not be.

        Args:
            wait: for a save that is still being written.
            raises: errors other than OSError; else they are logged like it.

        Returns:
            Whether there was a save, and it was not written.
        """
        thread = self._thread
        if thread is None or (not wait and thread.is_alive()):
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
        engine, saved, error = self._engine, self._saved, self._error
        self._engine = self._thread = self._saved = self._error = None
        if saved is None:
            self._undo()
        if saved is not None:
            engine.fire(Events.CHECKPOINT_SAVED, saved)
        if error is not None:
            # a full disk costs this checkpoint, not the run; one behind the writing is no full disk
            if raises and (saved is not None or not isinstance(error, OSError)):
                raise error
            self._report(engine, error)
        return saved is None

    def release(self) -> None:
        """Give the memory back; the last save has been settled."""
        self._snapshot = Snapshot()

    def _durable(self, saved: CheckpointSaved) -> None:
        self._saved = saved

    def _report(self, engine: Any, error: BaseException) -> None:
        get_logger("handlers").warning(
            "checkpoint not saved; the run and older checkpoints are as they were",
            iteration=self._iteration,
            error=str(error) or type(error).__name__,
        )
        # the event that it owed
        failed = HandlerFailed(handler="handlers.Checkpointer", event=Events.CHECKPOINT_SAVED.value, error=error)
        engine.fire(Events.HANDLER_FAILED, failed)


def _step_back() -> None:
    """Let the training go first: where it takes every core, the writing then slows it a third as much."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
