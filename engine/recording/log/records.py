"""One event as a line of JSON: what must be equal when the run is repeated comes first, what was observed last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pulsetrain.engine.errors import RecordingError

__all__ = [
    "LoggedEvent",
    "decode",
    "deterministic",
    "deterministic_parts",
    "encode",
    "merged",
    "take_measured",
]

MEASURED = frozenset({"seconds", "samples_per_second", "tokens_per_second"})  # keys of payloads

_T_DIGITS = 19  # of nanoseconds since 1970, from 2001 to 2286
_AROUND = len(b',"seq":') + len(b',"t":') + _T_DIGITS + len(b"}")


class LoggedEvent(msgspec.Struct, omit_defaults=True, gc=False):
    """An event of a log. Non-finite floats are the strings "NaN", "Infinity" and "-Infinity"."""

    ord: int = -1  # place among the deterministic events; -1 for an observed one, which has none
    engine: str = ""
    event: str = ""  # the event's value, such as "iteration_completed"
    epoch: int = 0
    iteration: int = 0
    payload: Any = None
    output: Any = None  # ITERATION_COMPLETED: the scalars of the step's output
    metrics: Any = None  # of epochs, validations, rollouts and POLICY_UPDATED: state.metrics after every receiver
    lr: Any = None  # ITERATION_COMPLETED: the rates of the last update, or of the engine's optimizer then
    error: Any = None  # what a receiver raised
    observed: Any = None  # fields of the payload that are measured: times, throughput
    open: bool = False  # its receivers were still running when it was written, or its values on a device
    seq: int = -1  # place in the bus's one order
    t: int = 0  # host wall clock, nanoseconds since 1970


encoded = msgspec.json.Encoder().encode  # `encode`, without the call
NO_PLAIN_VALUE = (TypeError, ValueError, OverflowError, RecursionError)  # what it raises
_decoder = msgspec.json.Decoder(LoggedEvent)
decode = _decoder.decode_lines


def encode(event: LoggedEvent) -> bytes:
    """The event as JSON, without a newline.

    Raises:
        RecordingError: a value that is no plain one.
    """
    try:
        return encoded(event)
    except NO_PLAIN_VALUE as error:
        raise RecordingError(f"{event.event} of {event.engine!r} cannot be written: {error}") from error


def deterministic(event: LoggedEvent, line: bytes) -> bytes:
    """The part of the event's line that must come again to the bit; empty for an observed event."""
    if event.ord < 0:
        return b""
    if event.observed is None and not event.open:
        return line[: -_AROUND - len(str(event.seq))]
    payload = event.payload if event.observed is None else _without(event.payload, event.observed) or None
    plain = msgspec.structs.replace(event, payload=payload, observed=None, open=False)
    return encoded(plain)[: -_AROUND - len(str(event.seq))]


def deterministic_parts(events: Sequence[LoggedEvent], lines: Sequence[bytes]) -> list[bytes]:
    """`deterministic` of each event that is; much faster where none has anything in it that was observed."""
    digits = len(str(events[0].seq))
    odd = [None for event in events if event.ord < 0 or event.open or event.observed is not None]
    if not odd and digits == len(str(events[-1].seq)):
        end = -_AROUND - digits
        return [line[:end] for line in lines]
    return [deterministic(event, line) for event, line in zip(events, lines, strict=True) if event.ord >= 0]


def take_measured(payload: Any) -> dict[str, Any] | None:
    """Take what is measured out of a plain payload; gives it in the same mappings, None for nothing."""
    if type(payload) is not dict:
        return None
    measured = () if MEASURED.isdisjoint(payload) else [name for name in payload if name in MEASURED]  # in its order
    observed = {name: payload.pop(name) for name in measured}
    for name, value in payload.items():
        if type(value) is dict and (inner := take_measured(value)):
            observed[name] = inner
    return observed or None


def _without(payload: Any, observed: Any) -> Any:
    """The payload with those names left out; it may be without them already."""
    if type(payload) is not dict:
        return payload
    return {
        name: _without(value, observed[name]) if name in observed else value
        for name, value in payload.items()
        if name not in observed or type(observed[name]) is dict
    }


def merged(payload: Any, observed: Any) -> Any:
    """The payload with what `take_measured` took out of it, which comes last."""
    if type(payload) is not dict or type(observed) is not dict:
        return observed
    inner = {name: merged(payload[name], value) if name in payload else value for name, value in observed.items()}
    return {**payload, **inner}
