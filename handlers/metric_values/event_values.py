"""Payloads and outputs as plain values of JSON, whatever they hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from math import isfinite, isnan
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from pulsetrain.engine.recording.log.records import MEASURED, LoggedEvent, pop_measured
from pulsetrain.handlers.metric_values.step_values import scalar, to_host

__all__ = ["EventValues", "PlainTypes", "summary"]

_PLAIN_NAMES = {name for kind in (float, int, bool, str) for name in (kind.__name__, str(kind))}  # of annotations
_CONTAINERS = (list, dict, tuple, set, frozenset, Mapping)
_NO_MAPPINGS = (*_CONTAINERS, Enum, str, PurePath, Real)  # whatever fields they have besides
MAX_DEPTH = 8  # of nesting; below it, and round a cycle, values are summarised
MAX_VALUES = 10_000  # in one payload; a container that would bring more is summarised


class EventValues:
    """Puts values in their places; those of scalars on a device follow later, many at once.

    Non-finite floats become the strings "NaN", "Infinity", "-Infinity"; what has no plain form {"__type__": ...}.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[Any, Any, Tensor]] = []  # where to put them: values that are on a device
        self._room = MAX_VALUES  # for what the payload under way still brings

    def put_payload(self, logged: LoggedEvent, payload: Any) -> None:
        """Put the payload's plain form in the event; what is measured in `observed`, at once or in `settle` as well."""
        before = len(self.pending)
        self.put(logged, "payload", payload)
        plain = logged.payload
        logged.observed = observed = pop_measured(plain)
        if observed is None:
            return
        moved = dict(_pairs(plain, observed))
        for index, (place, key, tensor) in enumerate(self.pending[before:], before):
            if id(place) in moved and key not in place:
                self.pending[index] = moved[id(place)], key, tensor
        if not plain:  # all of it was measured
            logged.payload = None

    def put(self, place: Any, key: Any, value: Any, depth: int = 0) -> None:
        """Set `place[key]` (of a Struct, its attribute) to the value's plain form, at once or in `settle`."""
        if type(value) is float and isfinite(value):  # by far the commonest
            _set(place, key, value)
            return
        if depth == 0:
            self._room = MAX_VALUES
        try:
            one = _one(value) if isinstance(value, Tensor) else None
            if one is not None:
                _set(place, key, None)
                self.pending.append((place, key, one.clone()))  # a step may change its own tensor in place
            else:
                _set(place, key, self._plain(value, depth))
        except Exception:  # a recorder never stops a run for what it was given
            _set(place, key, summary(value))

    def of_scalars(self, named: Mapping[str, Tensor | float]) -> dict[str, Any]:
        """The plain form of what `readings.scalars` gives, without looking at each value anew."""
        values: dict[str, Any] = {}
        for name, value in named.items():
            if type(name) is not str or not name.isascii():
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
            _set(place, key, _number(value))

    def _plain(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if depth < MAX_DEPTH and type(value) in (list, dict):
            return self._nested(value, depth)
        if isinstance(value, Enum):
            return value.name if value.name is None else _text(value.name)
        if isinstance(value, str):
            return _text(value)
        if isinstance(value, PurePath):
            return _text(str(value))
        if isinstance(value, np.bool_):
            return bool(value)
        if isinstance(value, Integral):
            return _number(int(value))
        if isinstance(value, Real):
            return _number(float(value))
        return self._nested(value, depth) if depth < MAX_DEPTH else summary(value)

    def _nested(self, value: Any, depth: int) -> Any:
        contains = isinstance(value, _CONTAINERS)
        parts = value if contains else _field_names(value)
        if parts is None or len(parts) > self._room:
            return summary(value)
        self._room -= len(parts)
        if contains and not isinstance(value, Mapping):
            items = _sorted(value) if isinstance(value, (set, frozenset)) else value
            plain: list[Any] = [None] * len(items)
            for index, item in enumerate(items):
                self.put(plain, index, item, depth + 1)
            return plain
        fields: dict[str, Any] = {}
        for name, item in value.items() if contains else [(name, getattr(value, name)) for name in parts]:
            self.put(fields, _text(str(name)), item, depth + 1)
        return fields


class PlainTypes(dict[type, tuple[str, ...] | None]):
    """The fields of a payload's type, where it says that it holds numbers and text alone; else None."""

    def __missing__(self, kind: type) -> tuple[str, ...] | None:
        fields = getattr(kind, "__dataclass_fields__", {"": None})
        types = {str(getattr(field, "type", None)) for field in fields.values()}
        plain = MEASURED.isdisjoint(fields) and _PLAIN_NAMES.issuperset(types) and not issubclass(kind, _NO_MAPPINGS)
        self[kind] = names = tuple(fields) if plain else None
        return names

    def holds(self, payload: Any) -> bool:
        """Whether the encoder takes this payload as it is: all its fields are finite numbers, booleans and text."""
        try:
            names = self[type(payload)]
            if names is None:
                return False
            for name in names:
                value = getattr(payload, name)
                kind = type(value)
                if kind is float:
                    if value - value:  # NaN, for what is not finite
                        return False
                elif kind is int:
                    if not -(2**63) <= value < 2**63:  # the compiler computes these
                        return False
                elif kind is not bool and kind is not str:
                    return False
        except Exception:  # a field that was never set
            return False
        return True


def summary(value: Any) -> dict[str, Any]:
    """What is told of a value that has no plain form: its type, an exception's message, a tensor's shape and dtype."""
    found: dict[str, Any] = {"__type__": "object"}
    try:  # an object may fail in any way when it is looked at, its class among them
        kind = value if issubclass(type(value), type) else type(value)
        found["__type__"] = _text(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."))
        if issubclass(type(value), BaseException):
            found["message"] = _text(str(value))
        elif hasattr(value, "shape") and hasattr(value, "dtype"):
            found |= {"shape": [_number(int(size)) for size in value.shape], "dtype": _text(str(value.dtype))}
    except Exception:
        pass
    return found


def _field_names(value: Any) -> Collection[str] | None:
    """Of a dataclass's or a struct's instance."""
    if isinstance(value, type):
        return None
    return (
        value.__struct_fields__ if isinstance(value, msgspec.Struct) else getattr(value, "__dataclass_fields__", None)
    )


def _one(tensor: Tensor) -> Tensor | None:
    """The tensor's only value in shape (), where it has one that is a real number or a truth."""
    if tensor.dtype is torch.bool:
        return tensor.detach().reshape(()) if tensor.numel() == 1 and not tensor.is_meta else None
    one = scalar(tensor)
    return one if isinstance(one, Tensor) else None


def _sorted(values: Collection[Any]) -> list[Any]:
    by_text = sorted(values, key=repr)  # else the order of what is neither less nor greater is the set's own
    try:
        return sorted(by_text)
    except Exception:  # of different kinds
        return by_text


def _pairs(plain: dict[str, Any], observed: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each mapping's id and the one that holds what was taken out of it."""
    yield id(plain), observed
    for name, inner in observed.items():
        if name in plain:
            yield from _pairs(plain[name], inner)


def _set(place: Any, key: Any, value: Any) -> None:
    if isinstance(place, msgspec.Struct):
        setattr(place, key, value)
    else:
        place[key] = value


def _finite(value: float) -> float | str:
    if isfinite(value):
        return value
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _number(value: Any) -> Any:
    if type(value) is float:
        return _finite(value)
    return value if type(value) is not int or -(2**63) <= value < 2**63 else str(value)


def _text(value: str) -> str:
    text = str.__str__(value)  # a subclass may make anything of itself, and no encoder takes it
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()  # lone surrogates


def _copied(tensor: Tensor) -> Any:
    try:
        return to_host([tensor])[0]
    except Exception:
        return summary(tensor)
