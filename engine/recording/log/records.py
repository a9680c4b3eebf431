"""One event as a line of JSON: the fields that must be equal when the run is repeated first, observed ones last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from pulsetrain.engine.errors import RecordingError

__all__ = [
    "ENCODING_ERRORS", "LOST", "MEASURED", "Json", "LoggedEvent", "decode", "deterministic", "deterministic_parts",
    "encode", "encoded", "merge_measured", "pop_measured",
]  # fmt: skip

Json: TypeAlias = Any  # a value that JSON can hold; readers index it freely, and a union would make each one cast

LOST = "log_lost"  # the event that reports events that were lost: see `Damage.of_record`
MEASURED = frozenset({"seconds", "samples_per_second", "tokens_per_second"})  # keys of payloads

_T_DIGITS = 19  # of nanoseconds since 1970, from 2001 to 2286
_AROUND = len(b',"seq":') + len(b',"t":') + _T_DIGITS + len(b"}")


class LoggedEvent(msgspec.Struct, omit_defaults=True, gc=False):
    """An event of a log. Non-finite floats are the strings "NaN", "Infinity" and "-Infinity".

    >>> encode(LoggedEvent(ord=0, engine="trainer", event="iteration_completed", iteration=1, output={"loss": 0.5}))
    b'{"ord":0,"engine":"trainer","event":"iteration_completed","iteration":1,"output":{"loss":0.5}}'
    """

    ord: int = -1  # number among the deterministic events; -1 for an observed event, which has none
    engine: str = ""
    event: str = ""  # the event's value, such as "iteration_completed"
    epoch: int = 0
    iteration: int = 0
    payload: Json = None
    output: Json = None  # ITERATION_COMPLETED: the scalars of the step's output
    metrics: Json = None  # epochs, validations, rollouts, POLICY_UPDATED: state.metrics after the last receiver
    lr: Json = None  # ITERATION_COMPLETED: the rates of the last update, or else of the engine's optimizer
    error: Json = None  # the exception that a receiver raised
    observed: Json = None  # measured fields of the payload: times, throughput
    open: bool = False  # written before its receivers returned, or before its values left the device
    seq: int = -1  # position in the one order of all events of the bus
    t: int = 0  # host wall clock, nanoseconds since 1970


# `encode` without its error message: saves a call on the hot path
encoded: Callable[[Any], bytes] = msgspec.json.Encoder().encode
ENCODING_ERRORS = (TypeError, ValueError, OverflowError, RecursionError)  # that `encoded` raises
_decoder = msgspec.json.Decoder(LoggedEvent)
decode: Callable[[bytes | str], list[LoggedEvent]] = _decoder.decode_lines


def encode(event: LoggedEvent) -> bytes:
    """The event as JSON, without a newline.

    Raises:
        RecordingError: it holds a value that JSON cannot.
    """
    try:
        return encoded(event)
    except ENCODING_ERRORS as error:
        raise RecordingError(
            f"{event.event} of {event.engine!r}, seq {event.seq}: cannot be written as JSON: {error}"
        ) from error


def deterministic(event: LoggedEvent, line: bytes) -> bytes:
    """The part of the event's line that a repeated run must reproduce bit for bit; empty for an observed event.

    >>> event = LoggedEvent(ord=0, engine="trainer", event="started", seq=7, t=10**18)
    >>> deterministic(event, encode(event))
    b'{"ord":0,"engine":"trainer","event":"started"'
    """
    if event.ord < 0:
        return b""
    if event.observed is None and not event.open:
        return line[: -_AROUND - len(str(event.seq))]
    return encoded(without_observed(event))[: -_AROUND - len(str(event.seq))]


def without_observed(event: LoggedEvent) -> LoggedEvent:
    """The event with what a repeated run must reproduce of its payload; complete.

    >>> payload = {"metrics": {"val/loss": 0.5}, "seconds": 1.5}
    >>> without_observed(LoggedEvent(0, payload=payload, observed={"seconds": 1.5})).payload
    {'metrics': {'val/loss': 0.5}}
    """
    payload = event.payload if event.observed is None else _without(event.payload, event.observed) or None
    return msgspec.structs.replace(event, payload=payload, observed=None, open=False)


def deterministic_parts(events: Sequence[LoggedEvent], lines: Sequence[bytes]) -> list[bytes]:
    """`deterministic` of each deterministic event, whose seqs ascend: without a call for most of them.

    >>> events = [LoggedEvent(ord=ord, event="started", seq=ord + 9, t=10**18) for ord in range(2)]
    >>> deterministic_parts(events, list(map(encode, events)))
    [b'{"ord":0,"event":"started"', b'{"ord":1,"event":"started"']
    """
    parts = []
    digits = end = above = 0  # of the events' seqs so far: how many digits, where the part ends, the first longer one
    for event, line in zip(events, lines, strict=True):
        if event.ord < 0:
            continue
        if event.open or event.observed is not None:
            parts.append(deterministic(event, line))
            continue
        if event.seq >= above:
            digits = len(str(event.seq))
            end, above = -_AROUND - digits, 10**digits
        parts.append(line[:end])
    return parts


def pop_measured(payload: Json) -> dict[str, Json] | None:
    """Remove the measured fields from a payload and return them, nested as they were; None if there are none.

    >>> payload = {"metrics": {"val/loss": 0.5}, "seconds": 1.5}
    >>> pop_measured(payload), payload
    ({'seconds': 1.5}, {'metrics': {'val/loss': 0.5}})
    """
    if type(payload) is not dict:
        return None
    measured = () if MEASURED.isdisjoint(payload) else [name for name in payload if name in MEASURED]  # in its order
    observed = {name: payload.pop(name) for name in measured}
    for name, value in payload.items():
        if type(value) is dict and (inner := pop_measured(value)):
            observed[name] = inner
    return observed or None


def _without(payload: Json, observed: Json) -> Json:
    """The payload without those names; they may already be absent."""
    if type(payload) is not dict:
        return payload
    return {
        name: _without(value, observed[name]) if name in observed else value
        for name, value in payload.items()
        if name not in observed or type(observed[name]) is dict
    }


def merge_measured(payload: Json, observed: Json) -> Json:
    """The payload with the fields that `pop_measured` removed, at its end."""
    if type(payload) is not dict or type(observed) is not dict:
        return observed
    inner = {
        name: merge_measured(payload[name], value) if name in payload else value for name, value in observed.items()
    }
    return {**payload, **inner}
