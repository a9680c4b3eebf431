"""Where two events differ, field by field: floats by their bits, or within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pulsetrain.engine.recording.log.records import Json, LoggedEvent, deterministic, encode

__all__ = ["ABSENT", "differing_fields", "leaves", "same"]

_IDENTITY = ("engine", "event", "epoch", "iteration")
_COMPARED = (*_IDENTITY, "payload", "output", "metrics", "lr", "error")

_Pair = tuple[Json, Json]


class _Absent:
    def __repr__(self) -> str:
        return "absent"

    def __reduce__(self) -> str:  # another process gets its own `ABSENT`
        return "ABSENT"


ABSENT = _Absent()  # a field's value on the side without the field


def same(x: LoggedEvent, y: LoggedEvent) -> bool:
    """Whether the events are bit for bit the same; if not, `differing_fields` says where."""
    return deterministic(x, encode(x)) == deterministic(y, encode(y))


def differing_fields(x: LoggedEvent, y: LoggedEvent, rtol: float = 0.0, atol: float = 0.0) -> dict[str, _Pair]:
    """The fields that differ, such as "output.loss", with both values; `ABSENT` on the side without the field.

    If the values of one event were lost with a killed process, only engine, type, epoch and iteration are compared.

    >>> differing_fields(LoggedEvent(output={"loss": 0.5}), LoggedEvent(output={"loss": 0.25, "kl": 1.0}))
    {'output.loss': (0.5, 0.25), 'output.kl': (absent, 1.0)}

    Args:
        rtol: floats agree if they differ by at most this fraction of the larger one,
        atol: or by at most this much.
    """
    fields: dict[str, _Pair] = {}
    for name in _IDENTITY if x.open or y.open else _COMPARED:
        exact = name in _IDENTITY
        for path, a, b in leaves(name, getattr(x, name), getattr(y, name)):
            if not (a == b if exact else _equal(a, b, rtol, atol)):
                fields[path] = a, b
    return fields


def leaves(path: str, x: Json, y: Json) -> Iterator[tuple[str, Json, Json]]:
    """The values in both that are no dicts and lists, with their paths; `ABSENT` on a side without the path."""
    if isinstance(x, dict) and isinstance(y, dict):
        for key in dict.fromkeys([*x, *y]):
            yield from leaves(f"{path}.{key}", x.get(key, ABSENT), y.get(key, ABSENT))
    elif isinstance(x, list) and isinstance(y, list):
        for index in range(max(len(x), len(y))):
            a, b = (values[index] if index < len(values) else ABSENT for values in (x, y))
            yield from leaves(f"{path}.{index}", a, b)
    else:
        yield path, x, y


def _equal(x: Json, y: Json, rtol: float, atol: float) -> bool:
    if type(x) is float and type(y) is float and x == y:
        return x != 0 or math.copysign(1, x) == math.copysign(1, y) or bool(rtol or atol)
    if type(x) is type(y) and x == y:
        return True
    if not (rtol or atol) or {type(x), type(y)} not in ({float}, {float, int}):
        return False
    return math.isclose(x, y, rel_tol=rtol, abs_tol=atol)
