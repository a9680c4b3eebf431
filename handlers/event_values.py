"""Payloads and outputs as plain values of JSON, whatever they hold."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from math import isfinite, isnan
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

import msgspec
from torch import Tensor

from engine.payloads import payload_fields
from engine.recording.lines import MEASURED
from handlers.readings import scalar, to_host

__all__ = ["EventValues", "PlainTypes"]

_FLOAT_NAMES = {"float", str(float)}  # of annotations
_PLAIN_NAMES = _FLOAT_NAMES | {name for kind in (int, bool, str) for name in (kind.__name__, str(kind))}
MAX_DEPTH = 8  # of nesting; below it, and round a cycle, values are summarised


class EventValues:
    """Puts values in their places; those of scalars on a device follow later, many at once.

    Non-finite floats become the strings "NaN", "Infinity", "-Infinity"; what has no plain form {"__type__": ...}.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[Any, Any, Tensor]] = []  # where to put them: values that are on a device

    def put(self, place: Any, key: Any, value: Any, depth: int = 0) -> None:
        """Set `place[key]` (of a Struct, its attribute) to the value's plain form, at once or in `settle`."""
        if type(value) is float and isfinite(value):  # by far the commonest
            _set(place, key, value)
            return
        try:
            one = scalar(value) if isinstance(value, Tensor) else None
            if isinstance(one, Tensor):
                _set(place, key, None)
                self.pending.append((place, key, one.clone()))  # a step may change its own tensor in place
            else:
                _set(place, key, self._plain(value, depth))
        except Exception:  # a recorder never stops a run for what it was given
            _set(place, key, _summary(value))

    def of_scalars(self, named: Mapping[str, Tensor | float]) -> dict[str, Any]:
        """The plain form of what `readings.scalars` gives, without looking at each value anew."""
        values: dict[str, Any] = {}
        for name, value in named.items():
            if not name.isascii():
                name = _text(name)
            if type(value) is float:
                values[name] = value if isfinite(value) else _finite(value)
            elif isinstance(value, Tensor):
                values[name] = None
                self.pending.append((values, name, value.clone()))
            else:
                self.put(values, name, value)
        return values

    def settle(self) -> None:
        """Copy the pending scalars to the host: one copy, and one wait for the device, per device and dtype."""
        pending, self.pending = self.pending, []
        tensors = [tensor for *_, tensor in pending]
        try:
            values: list[Any] = to_host(tensors)
        except Exception:  # one that cannot be stacked must not cost the others their values
            values = [_copied(tensor) for tensor in tensors]
        for (place, key, _), value in zip(pending, values, strict=True):
            _set(place, key, _finite(value) if isinstance(value, float) else value)

    def _plain(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if depth < MAX_DEPTH and type(value) in (list, dict):
            return self._nested(value, depth)
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, (str, PurePath)):
            return _text(str(value))
        if isinstance(value, Integral):
            number = int(value)
            return number if -(2**63) <= number < 2**63 else str(number)
        if isinstance(value, Real):
            return _finite(float(value))
        if depth >= MAX_DEPTH:
            return _summary(value)
        return self._nested(value, depth)

    def _nested(self, value: Any, depth: int) -> Any:
        items: Mapping[str, Any]
        if type(value) is dict or isinstance(value, Mapping):
            items = {_text(str(key)): item for key, item in value.items()}
        elif isinstance(value, (list, tuple)):
            plain: list[Any] = [None] * len(value)
            for index, item in enumerate(value):
                self.put(plain, index, item, depth + 1)
            return plain
        elif isinstance(value, (set, frozenset)):
            return self._plain(sorted(value, key=repr), depth)
        elif isinstance(value, type):
            return _summary(value)
        elif hasattr(value, "__dataclass_fields__"):
            items = payload_fields(value)
        elif isinstance(value, msgspec.Struct):
            items = {name: getattr(value, name) for name in value.__struct_fields__}
        else:
            return _summary(value)
        fields: dict[str, Any] = {}
        for name, item in items.items():
            self.put(fields, name, item, depth + 1)
        return fields


class PlainTypes(dict[type, tuple[str, ...] | None]):
    """The fields of a payload's type that are floats, where it says that it holds numbers and text alone; else None.

    The encoder takes such a payload as it is, when its floats are finite.
    """

    def __missing__(self, kind: type) -> tuple[str, ...] | None:
        fields = getattr(kind, "__dataclass_fields__", {"": None})
        kinds = {name: str(getattr(field, "type", None)) for name, field in fields.items()}
        plain = MEASURED.isdisjoint(fields) and _PLAIN_NAMES.issuperset(kinds.values())
        floats = tuple(name for name, text in kinds.items() if text in _FLOAT_NAMES) if plain else None
        self[kind] = floats
        return floats

    def holds(self, payload: Any) -> bool:
        """Whether the encoder takes this payload as it is."""
        floats = self[type(payload)]
        if floats is None:
            return False
        for name in floats:
            value = getattr(payload, name)
            if type(value) is not float or value - value:  # NaN, for what is not finite
                return False
        return True


def _set(place: Any, key: Any, value: Any) -> None:
    if isinstance(place, msgspec.Struct):
        setattr(place, key, value)
    else:
        place[key] = value


def _finite(value: float) -> float | str:
    if isfinite(value):
        return value
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _text(value: str) -> str:
    return value if value.isascii() else value.encode(errors="backslashreplace").decode()  # lone surrogates


def _copied(tensor: Tensor) -> Any:
    try:
        return to_host([tensor])[0]
    except Exception:
        return _summary(tensor)


def _summary(value: Any) -> dict[str, Any]:
    kind = value if isinstance(value, type) else type(value)
    summary: dict[str, Any] = {"__type__": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")}
    try:
        if isinstance(value, BaseException):
            summary["message"] = _text(str(value))
        elif hasattr(value, "shape") and hasattr(value, "dtype"):
            summary |= {"shape": [int(size) for size in value.shape], "dtype": str(value.dtype)}
    except Exception:  # an object may fail in any way when looked at
        pass
    return summary
