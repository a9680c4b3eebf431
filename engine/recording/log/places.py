"""Where in a log an iteration ends: a rank other than the main one continues there after a checkpoint."""

from __future__ import annotations

from pulsetrain.engine.recording.log.reader import EventLog

__all__ = ["place_after"]

_COMPLETED, _EPOCH_COMPLETED = "iteration_completed", "epoch_completed"
# of the engine itself: with them, what follows an iteration begins
_NEXT = frozenset(
    {
        *("get_batch_started", "dataloader_stop_iteration", "epoch_started", "iteration_started", "started"),
        *("completed", "terminate", "terminate_single_epoch", "interrupt", "preempted", "exception_raised"),
        *("checkpoint_loaded", "checkpoint_saved"),
    }
)


def place_after(log: EventLog, engine: str, iteration: int, in_epoch: bool) -> tuple[int, int]:
    """The number of the last event that belongs to an iteration or an earlier one, and the next event's `ord`.

    Args:
        log: the rank's.
        engine: whose iteration.
        iteration: the last one of the checkpoint; the log may lack it, if fewer processes trained then.
        in_epoch: whether the checkpoint was saved before the epoch was completed.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from pulsetrain.engine.recording import LoggedEvent, LogWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = LogWriter(Path(folder))
    ...     names = ["started", "iteration_completed", "metrics_logged", "get_batch_started", "iteration_completed"]
    ...     for number, name in enumerate(names):
    ...         event = LoggedEvent(ord=number, engine="trainer", event=name, iteration=number // 4 + 1, seq=number)
    ...         writer.add(event)
    ...     writer.close()
    ...     place_after(EventLog(folder), "trainer", 1, in_epoch=True)
    (2, 3)
    """
    seq, ord, done = -1, 0, False
    following = _NEXT | {_EPOCH_COMPLETED} if in_epoch else _NEXT
    for event in log.read() if iteration else ():
        if log.is_superseded(event.seq):  # an observed one, which `read` yields all the same
            continue
        if event.engine == engine and (event.iteration > iteration or (done and event.event in following)):
            break
        done = done or (event.engine == engine and (event.event, event.iteration) == (_COMPLETED, iteration))
        seq, ord = event.seq, max(ord, event.ord + 1)
    return seq, ord
