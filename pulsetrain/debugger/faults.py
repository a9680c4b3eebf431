"""Finds what went wrong in a recorded run: the exception that ended it, an anomaly, a NaN or infinite loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pulsetrain.engine.events.names import Events
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.ending import format_error
from pulsetrain.engine.recording.log.non_finite import parse_non_finite
from pulsetrain.engine.recording.log.records import Json
from pulsetrain.engine.recording.replay.payloads import whole
from pulsetrain.engine.recording.replay.source import Past
from pulsetrain.export.event_formats import format_rows
from pulsetrain.handlers.recorder.fingerprints import FingerprintEvents

__all__ = ["Fault", "find_faults"]

_STARTED = frozenset({Events.STARTED.value})
_RAISED = frozenset({Events.EXCEPTION_RAISED.value})
_ANOMALY = frozenset({Events.ANOMALY_DETECTED.value})
_ITERATED = frozenset({Events.ITERATION_COMPLETED.value})
_BATCH = frozenset({FingerprintEvents.BATCH_FINGERPRINTED.value})


@dataclass(frozen=True)
class Fault:
    """Something that went wrong."""

    event: LoggedEvent  # the event that reports it
    what: str
    batch: str | None  # what the log holds about the batch

    def __str__(self) -> str:
        event = self.event
        batch = "" if self.batch is None else f"; {self.batch}"
        return f"{self.what}, at epoch {event.epoch}, iteration {event.iteration} (seq {event.seq}){batch}"


def find_faults(past: Past, engines: Sequence[str], main: str, last: LoggedEvent | None) -> list[Fault]:
    """The faults of the run's last start, the exception first; empty if it ended well.

    For a loss that is not finite, this is the first such loss, found by bisection: right if all later ones are such.

    Args:
        past: of the run's log.
        engines: the log's engines.
        main: the engine of the training run.
        last: the log's last event.
    """
    if last is None:
        return []
    started = past.last(main, _STARTED, last.seq)
    first = started.seq if started is not None else -1
    raised = _raised(past, engines, main, first, last.seq)
    others = [_anomaly(past, main, first, last.seq), _not_finite(past, main, first, last.seq)]
    found = sorted((each for each in others if each is not None), key=lambda each: each[0].seq)
    if raised is not None:
        found.insert(0, raised)
    return [Fault(event, what, _batch(past, event, main)) for event, what in found]


def _raised(past: Past, engines: Sequence[str], main: str, first: int, end: int) -> tuple[LoggedEvent, str] | None:
    """The first event that reports the exception that ended the run: possibly of an engine that the main one ran."""
    last = past.last(main, _RAISED, end)
    if last is None or last.seq < first:
        return None
    error = _error(last)
    events = [event for engine in engines if (event := past.last(engine, _RAISED, last.seq)) is not None]
    origin = min((event for event in events if event.seq > first and _error(event) == error), key=lambda e: e.seq)
    return origin, error


def _error(event: LoggedEvent) -> str:
    error = _payload(event).get("error")
    return format_error(error) if isinstance(error, dict) else "an exception"


def _anomaly(past: Past, main: str, first: int, end: int) -> tuple[LoggedEvent, str] | None:
    """An anomaly in the last iteration, or the one before."""
    event, last = past.last(main, _ANOMALY, end), past.last(main, None, end)
    if event is None or last is None or event.seq < first or event.iteration < last.iteration - 1:
        return None
    payload = _payload(event)
    return event, f"anomaly {payload.get('kind', '?')} ({payload.get('value', '?')})"


def _not_finite(past: Past, main: str, first: int, end: int) -> tuple[LoggedEvent, str] | None:
    last = past.last(main, _ITERATED, end)
    if last is None or last.seq < first or math.isfinite(_loss(last)):
        return None
    low, found = first, last  # the loss up to `low` is finite, that of `found` is not
    while low + 1 < found.seq:
        middle = (low + found.seq) // 2
        event = past.last(main, _ITERATED, middle)
        if event is None or event.seq <= low or math.isfinite(_loss(event)):
            low = middle
        else:
            found = event
    return found, f"the loss is {_loss(found)}"


def _loss(event: LoggedEvent) -> float:
    loss = parse_non_finite(event.output.get("loss")) if isinstance(event.output, dict) else None
    return loss if isinstance(loss, (int, float)) else 0.0


def _payload(event: LoggedEvent) -> dict[str, Json]:
    return event.payload if isinstance(event.payload, dict) else {}


def _batch(past: Past, event: LoggedEvent, main: str) -> str | None:
    """The batch's rows, if the event holds them, or else its fingerprint."""
    rows = _payload(whole(event)).get("batch_indices")
    if rows and isinstance(rows, list):
        return f"batch: {format_rows(rows)}"
    taken = past.last(main, _BATCH, event.seq)
    current = past.last(main, None, event.seq)
    if taken is None or current is None or taken.iteration < current.iteration - 1:
        return None
    # fingerprinted before its iteration begins
    return f"batch of iteration {taken.iteration + 1}: fingerprint {_payload(taken).get('batch')}"
