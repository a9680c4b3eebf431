"""Where in a log an iteration ends: a rank other than the main one continues there after a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from pulsetrain.engine.recording.log.reader import EventLog

__all__ = ["ATTEMPT", "count_after_end", "last_in_common", "place_after"]

ATTEMPT = "attempt"  # in `observed` of an engine's STARTED: an id of the start, the same in the logs of all ranks
_COMPLETED, _EPOCH_COMPLETED, _ENDED = "iteration_completed", "epoch_completed", "completed"
# of the engine itself: with them, what follows an iteration begins. The first ones are never fired within one, and so
# end it even in a log without its end, such as one that leaves iterations out
_BETWEEN = frozenset(
    {"get_batch_started", "dataloader_stop_iteration", "epoch_started", "started", "checkpoint_loaded"}
)
_ENDS = frozenset({"completed", "terminate", "interrupt", "preempted", "checkpoint_saved"})  # of a run
_NEXT = _BETWEEN | {
    *("iteration_started", "checkpoint_saved", "completed", "terminate", "terminate_single_epoch", "interrupt"),
    *("preempted", "exception_raised"),
}


def place_after(
    log: EventLog, engine: str, iteration: int, in_epoch: bool, *, after_end: int | None = None
) -> tuple[int, int]:
    """The number of the last event that belongs to an iteration or an earlier one, and the next event's `ord`.

    Args:
        log: the rank's.
        engine: whose iteration.
        iteration: the last one of the checkpoint; the log may lack it, if fewer processes trained then.
        in_epoch: whether the checkpoint was saved before the epoch was completed.
        after_end: how many events of the engine, but observed ones, there were from its COMPLETED to the checkpoint,
            such as those of a last validation. None: it was saved before that.

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
    seq, ord, done, has_ended, kept = -1, 0, False, False, 0
    between, following = (each | {_EPOCH_COMPLETED} if in_epoch else each for each in (_BETWEEN, _NEXT))
    following -= frozenset() if after_end is None else _ENDS
    for event in log.read() if iteration else ():
        if log.is_superseded(event.seq):  # an observed one, which `read` yields all the same
            continue
        if event.engine == engine:
            is_there = event.iteration == iteration
            done = done or (is_there and event.event in between)
            if event.iteration > iteration or (done and not has_ended and event.event in following):
                break
            done = done or (is_there and event.event == _COMPLETED)
            has_ended = has_ended or (after_end is not None and is_there and event.event == _ENDED)
            kept += has_ended and event.ord >= 0 and event.event != _ENDED
        seq, ord = event.seq, max(ord, event.ord + 1)
        if has_ended and kept == after_end:
            break
    return seq, ord


def count_after_end(log: EventLog, engine: str, iteration: int) -> int:
    """How many events of the engine, but observed ones, there are from its COMPLETED at this iteration on.

    A run that has ended may be resumed and end there again: they count from the first time.
    """
    has_ended, count = False, 0
    for event in log.read(engine=engine, iteration=(iteration, iteration)):
        count += has_ended and event.ord >= 0
        has_ended = has_ended or (event.event == _ENDED and not log.is_superseded(event.seq))
    return count


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
