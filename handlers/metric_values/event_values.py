"""Payloads and outputs as plain JSON values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from math import isfinite
from numbers import Integral, Real
from operator import attrgetter
from pathlib import PurePath
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from pulsetrain.engine.recording.log.non_finite import finite_or_text
from pulsetrain.engine.recording.log.records import MEASURED, LoggedEvent, pop_measured
from pulsetrain.handlers.metric_values.step_values import is_on_host, scalar, to_host

__all__ = ["EventValues", "PlainTypes", "are_finite", "are_numbers", "encode_plain", "summary"]

_NO_MAPPINGS = (list, dict, tuple, set, frozenset, Mapping, Enum, str, PurePath, Real)  # whatever fields they have
MAX_DEPTH = 8  # of nesting; deeper values, cycles among them, are summarised
MAX_VALUES = 10_000  # in one payload; a container that would exceed this is summarised

Target: TypeAlias = msgspec.Struct | dict[str, object] | list[object]  # a value is set in it, under a key


class EventValues:
    """Sets values in their targets. Scalars on a device follow in `settle`, with one copy for all of them.

    Non-finite floats become the strings "NaN", "Infinity", "-Infinity"; a value without a plain form becomes
    {"__type__": ...}.

    >>> values, target = EventValues(), {}
    >>> values.put(target, "loss", torch.tensor(0.5))
    >>> values.put(target, "ratio", float("nan"))
    >>> values.settle()
    >>> target
    {'loss': 0.5, 'ratio': 'NaN'}
    """

    def __init__(self) -> None:
        self.pending: list[tuple[Target, str | int, Tensor]] = []  # target, key and value that is on a device
        self._room = MAX_VALUES  # values that the current payload may still add

    def put_payload(self, logged: LoggedEvent, payload: object) -> None:
        """Set the payload's plain form in the event, and its measured values in the event's `observed`."""
        before = len(self.pending)
        self.put(logged, "payload", payload)
        plain = logged.payload
        logged.observed = observed = pop_measured(plain)
        if observed is None:
            return
        moved = dict(_pairs(plain, observed))
        for index, (place, key, tensor) in enumerate(self.pending[before:], before):
            if id(place) in moved and isinstance(place, dict) and key not in place:
                self.pending[index] = moved[id(place)], key, tensor
        if not plain:  # all of it was measured
            logged.payload = None

    def put(self, place: Target, key: str | int, value: object, depth: int = 0) -> None:
        """Set `place[key]` (of a Struct, its attribute) to the value's plain form, now or in `settle`."""
        kind = type(value)
        if kind is float and isfinite(value):  # type: ignore[arg-type]  # by far the most common
            _set(place, key, value)
            return
        if kind is list and depth == 0 and len(value) < 100 and are_finite(value):  # type: ignore[arg-type]
            _set(place, key, [*value])  # type: ignore[misc]
            return
        if depth == 0:
            self._room = MAX_VALUES
        try:
            one = _one(value) if isinstance(value, Tensor) else None
            if one is not None:
                self._put_scalar(place, key, one)
            else:
                _set(place, key, self._plain(value, depth))
        except Exception:  # no value that a recorder is given may stop the run
            _set(place, key, summary(value))

    def of_scalars(self, named: Mapping[str, Tensor | float]) -> dict[str, object]:
        """The plain form of a result of `step_values.scalars`, whose values need no further check."""
        values: dict[str, object] = {}
        for name, value in named.items():
            if type(name) is not str or not name.isascii():
                name = _text(name)
            if type(value) is Tensor and is_on_host(value) and value.is_floating_point():
                value = value.item()
            if type(value) is float:
                values[name] = value if isfinite(value) else finite_or_text(value)
            elif isinstance(value, Tensor):
                self._put_scalar(values, name, value)
            else:
                self.put(values, name, value)
        return values

    def _put_scalar(self, place: Target, key: str | int, value: Tensor) -> None:
        if is_on_host(value):
            _set(place, key, _number(value.item()))
        else:
            _set(place, key, None)
            self.pending.append((place, key, value.clone()))  # a step may change its tensor in place

    def settle(self) -> None:
        """Copy the pending scalars to the host: one copy, and one wait for the device, per device and dtype."""
        pending, self.pending = self.pending, []
        tensors = [tensor for *_, tensor in pending]
        try:
            values: list[object] = list(to_host(tensors))
        except Exception:  # one that cannot be stacked must not cost the others their values
            values = [_copied(tensor) for tensor in tensors]
        for (place, key, _), value in zip(pending, values, strict=True):
            _set(place, key, _number(value))

    def _plain(self, value: object, depth: int) -> object:
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

    def _nested(self, value: object, depth: int) -> object:
        items: Iterable[tuple[object, object]]
        if isinstance(value, (list, tuple, set, frozenset)):
            if not self._takes(len(value)):
                return summary(value)
            plain: list[object] = [None] * len(value)
            for index, item in enumerate(_sorted(value) if isinstance(value, (set, frozenset)) else value):
                self.put(plain, index, item, depth + 1)
            return plain
        if isinstance(value, (dict, Mapping)):  # a dict is not asked whether it is a Mapping, which is slow
            if not self._takes(len(value)):
                return summary(value)
            items = value.items()
        else:
            names = _field_names(value)
            if names is None or not self._takes(len(names)):
                return summary(value)
            items = [(name, getattr(value, name)) for name in names]
        fields: dict[str, object] = {}
        for name, item in items:
            key = _text(str(name))
            self.put(fields, key if key not in fields else _distinct(key, name, fields), item, depth + 1)
        return fields

    def _takes(self, values: int) -> bool:
        """Whether the payload may add so many values."""
        if values > self._room:
            return False
        self._room -= values
        return True


class PlainTypes(dict[type, Callable[[object], tuple[object, ...]] | None]):
    """What reads the fields of a payload of each type; None for a type whose payloads need `EventValues`."""

    def __missing__(self, kind: type) -> Callable[[object], tuple[object, ...]] | None:
        names = tuple(getattr(kind, "__dataclass_fields__", ()))
        if names and MEASURED.isdisjoint(names) and not issubclass(kind, _NO_MAPPINGS):
            self[kind] = attrgetter(*names, names[0])  # of one name it would give no tuple
        else:
            self[kind] = None
        return self[kind]

    def fits(self, payload: object) -> bool:
        """Whether `encode_plain` may be given the payload: its fields are finite numbers, booleans, text and tensors.

        >>> from pulsetrain.engine.events.payloads import MetricsLogged, OptimizerStepCompleted
        >>> types = PlainTypes()
        >>> types.fits(OptimizerStepCompleted(learning_rates=(0.1,))), types.fits(MetricsLogged(metrics={}))
        (True, False)
        """
        read = self[type(payload)]
        if read is None:
            return False
        try:
            values = read(payload)
        except Exception:  # a field that was never set
            return False
        for value in values:
            kind = type(value)
            if kind is float:
                if value - value:  # type: ignore[operator]  # NaN unless the value is finite
                    return False
            elif kind is tuple:
                if not are_finite(value):  # type: ignore[arg-type]
                    return False
            elif kind is int:
                if not -(2**63) <= value < 2**63:  # type: ignore[operator]  # the compiler computes these
                    return False
            elif kind is not str and kind is not bool and kind is not Tensor:
                return False
        return True


def are_finite(values: Iterable[object]) -> bool:
    """Whether all values are finite floats."""
    for value in values:  # noqa: SIM110  # all() of a generator takes three times as long
        if type(value) is not float or value - value:
            return False
    return True


def are_numbers(named: Mapping[object, object]) -> bool:
    """Whether `encode_plain` may be given this mapping: its values are finite floats and tensors."""
    for name, value in named.items():
        if type(name) is not str or (type(value) is not Tensor and (type(value) is not float or value - value)):
            return False
    return True


def _read(value: object) -> float:
    """The number in a tensor that the encoder meets."""
    if type(value) is Tensor and is_on_host(value) and not value.dim() and value.is_floating_point():
        number = value.item()
        if not number - number:  # else it is not finite
            return number
    raise TypeError


encode_plain: Callable[[Any], bytes] = msgspec.json.Encoder(enc_hook=_read).encode
"""Encodes an event whose payload fits `PlainTypes`, whose output `are_numbers` and whose rates `are_finite`, or which
has none of these. It raises an Exception for tensors that are on a device, are not a scalar or are not finite."""


def summary(value: object) -> dict[str, object]:
    """Describes a value without a plain form: its type, an exception's message, a tensor's shape and dtype.

    >>> summary(torch.zeros(2, 3))
    {'__type__': 'torch.Tensor', 'shape': [2, 3], 'dtype': 'torch.float32'}
    """
    found: dict[str, object] = {"__type__": "object"}
    try:  # any access to an object may fail, even to its class
        kind = cast(type, value) if issubclass(type(value), type) else type(value)
        found["__type__"] = _text(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."))
        if issubclass(type(value), BaseException):
            found["message"] = _text(str(value))
        elif hasattr(value, "shape") and hasattr(value, "dtype"):
            found |= {"shape": [_number(int(size)) for size in value.shape], "dtype": _text(str(value.dtype))}
    except Exception:
        pass
    return found


def _field_names(value: object) -> Collection[str] | None:
    """The fields of an instance of a dataclass or a struct."""
    names = "__struct_fields__" if isinstance(value, msgspec.Struct) else "__dataclass_fields__"
    return None if isinstance(value, type) else getattr(value, names, None)


def _one(tensor: Tensor) -> Tensor | None:
    """The tensor's only value in shape (), if it is one real number or boolean."""
    if tensor.dtype is torch.bool:
        return tensor.detach().reshape(()) if tensor.numel() == 1 and not tensor.is_meta else None
    one = scalar(tensor)
    return one if isinstance(one, Tensor) else None


def _sorted(values: Collection[object]) -> list[object]:
    by_text = sorted(values, key=repr)  # so that values that compare as neither less nor greater have an order
    try:
        return sorted(by_text)  # type: ignore[type-var]
    except Exception:  # of different kinds
        return by_text


def _pairs(plain: dict[str, Any], observed: dict[str, Any]) -> Iterator[tuple[int, dict[str, object]]]:
    """The id of each mapping, and the mapping that holds the values moved out of it."""
    yield id(plain), observed
    for name, inner in observed.items():
        if name in plain:
            yield from _pairs(plain[name], inner)


def _set(place: Target, key: Any, value: object) -> None:  # a dict's key is text, a list's a number
    if isinstance(place, msgspec.Struct):
        setattr(place, key, value)
    else:
        place[key] = value


def _number(value: object) -> object:
    if type(value) is float:
        return finite_or_text(value)
    return value if type(value) is not int or -(2**63) <= value < 2**63 else str(value)


def _text(value: str) -> str:
    text = str.__str__(value)  # of a subclass too, which may override it and which no encoder accepts
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()  # lone surrogates


def _distinct(key: str, name: object, fields: Collection[str]) -> str:
    """A key for a name whose text another name has, as 1 and "1"."""
    key = f"{key} ({type(name).__name__})"
    while key in fields:
        key += "'"
    return key


def _copied(tensor: Tensor) -> object:
    try:
        return to_host([tensor])[0]
    except Exception:
        return summary(tensor)
