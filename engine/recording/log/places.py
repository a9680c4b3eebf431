"""Where in a log an iteration ends: a rank other than the main one continues there after a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from pulsetrain.engine.recording.log.reader import EventLog

__all__ = ["ATTEMPT", "last_in_common", "place_after"]

ATTEMPT = "attempt"  # in `observed` of an engine's STARTED: an id of the start, the same in the logs of all ranks
_COMPLETED, _EPOCH_COMPLETED = "iteration_completed", "epoch_completed"
# of the engine itself: with them, what follows an iteration begins. The first ones are never fired within one, and so
# end it even in a log without its end, such as one that leaves iterations out
_BETWEEN = frozenset(
    {"get_batch_started", "dataloader_stop_iteration", "epoch_started", "started", "checkpoint_loaded"}
)
_NEXT = _BETWEEN | {
    *("iteration_started", "checkpoint_saved", "completed", "terminate", "terminate_single_epoch", "interrupt"),
    *("preempted", "exception_raised"),
}


_ENDS = frozenset({"completed", "terminate", "interrupt", "preempted", "checkpoint_saved"})  # within an ending run


def place_after(
    log: EventLog, engine: str, iteration: int, in_epoch: bool, *, is_ending: bool = False
) -> tuple[int, int]:
    """The number of the last event that belongs to an iteration or an earlier one, and the next event's `ord`.

    Args:
        log: the rank's.
        engine: whose iteration.
        iteration: the last one of the checkpoint; the log may lack it, if fewer processes trained then.
        in_epoch: whether the checkpoint was saved before the epoch was completed.
        is_ending: whether it was saved where the run ended, after what is fired there.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from pulsetrain.engine.recording import LoggedEvent, LogWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = LogWriter(Path(folder))
    ...     names = ["started", "iteration_completed", "metrics_logged", "get_batch_started", "iteration_completed"]
    ...     for number, (name, iteration) in enumerate(zip(names, (0, 1, 1, 1, 2), strict=True)):
    ...         event = LoggedEvent(ord=number, engine="trainer", event=name, iteration=iteration, seq=number)
    ...         writer.add(event)
    ...     writer.close()
    ...     place_after(EventLog(folder), "trainer", 1, in_epoch=True)
    (2, 3)
    """
    seq, ord, done = -1, 0, False
    between, following = (each | {_EPOCH_COMPLETED} if in_epoch else each for each in (_BETWEEN, _NEXT))
    following -= _ENDS if is_ending else frozenset()
    for event in log.read() if iteration else ():
        if log.is_superseded(event.seq):  # an observed one, which `read` yields all the same
            continue
        if event.engine == engine:
            is_there = event.iteration == iteration
            done = done or (is_there and event.event in between)
            if event.iteration > iteration or (done and event.event in following):
                break
            done = done or (is_there and event.event == _COMPLETED)
        seq, ord = event.seq, max(ord, event.ord + 1)
    return seq, ord


def last_in_common(log: EventLog, starts: Iterable[tuple[int, str]], iteration: int) -> int:
    """The last iteration up to which a rank's log belongs to the run that has reached an iteration.

    Args:
        log: the rank's.
        starts: of the run, the first one first: after which iteration, and its id.
        iteration: the last one of the checkpoint. It is the answer if the rank was there at the last start; else those
            after the first start without it were computed by the other ranks alone.
    """
    seen = {(event.observed or {}).get(ATTEMPT, "") for event in log.read(event="started")}
    for start, attempt in reversed(list(starts)):
        if attempt in seen:
            break
        iteration = min(iteration, start)
    return iteration
