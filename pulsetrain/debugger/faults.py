"""What went wrong in a recorded run: the exception that ended it, an anomaly, a loss that is no number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pulsetrain.engine.events.names import Events
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.replay.payloads import plain, whole
from pulsetrain.engine.recording.replay.source import Past
from pulsetrain.handlers.recorder.fingerprints import FingerprintEvents

__all__ = ["Fault", "find_faults"]

_STARTED = frozenset({Events.STARTED.value})
_RAISED = frozenset({Events.EXCEPTION_RAISED.value})
_ANOMALY = frozenset({Events.ANOMALY_DETECTED.value})
_ITERATED = frozenset({Events.ITERATION_COMPLETED.value})
_BATCH = frozenset({FingerprintEvents.BATCH_FINGERPRINTED.value})
_ROWS = 16  # of a batch that are told


@dataclass(frozen=True)
class Fault:
    """One that the run ended in, or came to."""

    event: LoggedEvent  # that tells it
    what: str
    batch: str | None  # what the log tells of the batch

    def __str__(self) -> str:
        event = self.event
        batch = "" if self.batch is None else f"; {self.batch}"
        return f"{self.what}, at epoch {event.epoch}, iteration {event.iteration} (seq {event.seq}){batch}"


def find_faults(past: Past, engines: Sequence[str], main: str, end: LoggedEvent | None) -> list[Fault]:
    """What the run's last part ended in, the exception first; none where it ended well.

    Of a loss that is no number it is the first such loss, found by halving: right where it stayed so.

    Args:
        past: of the run's log.
        engines: the log's.
        main: the engine whose run it is.
        end: the log's last event.
    """
    if end is None:
        return []
    started = past.last(main, _STARTED, end.seq)
    first = started.seq if started is not None else -1
    raised = _raised(past, engines, main, first, end.seq)
    others = [_anomaly(past, main, first, end.seq), _not_finite(past, main, first, end.seq)]
    found = sorted((each for each in others if each is not None), key=lambda each: each[0].seq)
    if raised is not None:
        found.insert(0, raised)
    return [Fault(event, what, _batch(past, event, main)) for event, what in found]


def _raised(past: Past, engines: Sequence[str], main: str, first: int, end: int) -> tuple[LoggedEvent, str] | None:
    """Where the exception that ended the run was told first: maybe by an engine that the main one ran."""
    last = past.last(main, _RAISED, end)
    if last is None or last.seq < first:
        return None
    error = _error(last)
    events = [event for engine in engines if (event := past.last(engine, _RAISED, last.seq)) is not None]
    origin = min((event for event in events if event.seq > first and _error(event) == error), key=lambda e: e.seq)
    return origin, error


def _error(event: LoggedEvent) -> str:
    payload = event.payload if isinstance(event.payload, dict) else {}
    error = payload.get("error")
    error = error if isinstance(error, dict) else {}
    name = str(error.get("__type__", "an exception")).rpartition(".")[2]
    return f"{name}: {error['message']}" if error.get("message") else name


def _anomaly(past: Past, main: str, first: int, end: int) -> tuple[LoggedEvent, str] | None:
    """One in the last iteration, or the one before."""
    event, last = past.last(main, _ANOMALY, end), past.last(main, None, end)
    if event is None or last is None or event.seq < first or event.iteration < last.iteration - 1:
        return None
    payload = event.payload if isinstance(event.payload, dict) else {}
    return event, f"anomaly {payload.get('kind', '?')} ({payload.get('value', '?')})"


def _not_finite(past: Past, main: str, first: int, end: int) -> tuple[LoggedEvent, str] | None:
    last = past.last(main, _ITERATED, end)
    if last is None or last.seq < first or math.isfinite(_loss(last)):
        return None
    low, found = first, last  # what ends at `low` is finite, `found` is not
    while low + 1 < found.seq:
        middle = (low + found.seq) // 2
        event = past.last(main, _ITERATED, middle)
        if event is None or event.seq <= low or math.isfinite(_loss(event)):
            low = middle
        else:
            found = event
    return found, f"the loss is {_loss(found)}"


def _loss(event: LoggedEvent) -> float:
    loss: Any = plain(event.output.get("loss")) if isinstance(event.output, dict) else None
    return loss if isinstance(loss, (int, float)) else 0.0


def _batch(past: Past, event: LoggedEvent, main: str) -> str | None:
    """Its rows, as an anomaly knows them, or its fingerprint."""
    rows = whole(event).payload.get("batch_indices") if isinstance(event.payload, dict) else None
    if rows and isinstance(rows, list):
        more = f" and {len(rows) - _ROWS} more" if len(rows) > _ROWS else ""
        return f"batch: rows {', '.join(map(str, rows[:_ROWS]))}{more}"
    taken = past.last(main, _BATCH, event.seq)
    place = past.last(main, None, event.seq)
    if taken is None or place is None or taken.iteration < place.iteration - 1:
        return None
    payload = taken.payload if isinstance(taken.payload, dict) else {}
    return f"batch of iteration {taken.iteration + 1}: fingerprint {payload.get('batch')}"  # taken before it begins
