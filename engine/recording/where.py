"""Where each process of a run stands, or stood when it ended: read from the logs alone."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pulsetrain.engine.recording.log.reader import EventLog, logged_ranks
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.engine.recording.log.stall import Stall, read_stall

__all__ = ["Position", "positions", "stragglers"]

# what a process does after the event, in the order of an iteration
_AFTER = {
    "get_batch_started": "loading a batch",
    "get_batch_completed": "beginning a step",
    "iteration_started": "in a step",
    "gradients_ready": "in the handlers of gradients_ready, or making an update",
    "optimizer_step_completed": "ending a step",
    "iteration_completed": "in the handlers of iteration_completed, such as a save, or between two batches",
}
_ORDER = {event: number for number, event in enumerate(_AFTER)}
_ENDED = ("completed", "terminate", "exception_raised")


@dataclass(frozen=True)
class Position:
    """A process's last event, and what it has done since."""

    rank: int
    event: LoggedEvent
    reached: LoggedEvent  # the last one of the training run itself, which a validation has events inside of
    stall: Stall | None  # its stack, if it has stood still for seconds after that event
    ended: bool  # whether its log was closed: the run has ended there

    @property
    def activity(self) -> str:
        """What the process did after its last event, as far as the event tells."""
        return _AFTER.get(self.event.event, f"in the handlers of {self.event.event}, or after it")

    @property
    def place(self) -> str:
        """The innermost line of its code; "" if it is not known."""
        return "" if self.stall is None or not self.stall.stack else self.stall.stack[0]


def positions(run: str | os.PathLike[str]) -> list[Position]:
    """The last event of each process of a run, by rank.

    Args:
        run: a run folder.

    Raises:
        RecordingError: it holds no log.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from pulsetrain.engine.recording import LogWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for rank, event in enumerate(["iteration_started", "get_batch_started"]):
    ...         writer = LogWriter(Path(folder, "events"), rank)
    ...         writer.add(LoggedEvent(ord=0, engine="trainer", event=event, iteration=7, seq=0, t=10**18))
    ...     found = positions(folder)
    ...     [each.activity for each in found], [each.rank for each in stragglers(found)]
    (['in a step', 'loading a batch'], [1])
    """
    found = []
    for rank in logged_ranks(run):
        log = EventLog(run, rank)
        nothing = LoggedEvent(event="no event")
        last = log.last() or nothing
        stall = read_stall(log.folder, rank)
        stall = stall if stall is not None and stall.seq == last.seq else None
        found.append(Position(rank, last, log.last(log.main_engine) or nothing, stall, log.ended))
    return found


def stragglers(found: list[Position]) -> list[Position]:
    """Those that the others wait for: the furthest behind; of several there, those that do not wait in a collective.

    Empty if all have ended.
    """
    running = [each for each in found if not each.ended and each.event.event not in _ENDED]
    if not running:
        return []
    least = min(map(_progress, running))
    last = [each for each in running if _progress(each) == least]
    busy = [each for each in last if each.stall is not None and not each.stall.waits]
    return busy or last


def _progress(position: Position) -> tuple[int, int]:
    event = position.reached
    return event.iteration, _ORDER.get(event.event, len(_ORDER))
