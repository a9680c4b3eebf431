"""Plain values of a log as what handlers were given: typed payloads, outputs, errors."""

from __future__ import annotations

import builtins
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording.log.non_finite import NON_FINITE
from pulsetrain.engine.recording.log.records import LoggedEvent, merge_measured

__all__ = ["ReplayedOutput", "payload_of", "plain", "whole"]


class ReplayedOutput(dict[str, Any]):
    """The scalars of a step's output, by name; as an attribute, `loss` is a tensor as a step's is."""

    @property
    def loss(self) -> Tensor | None:
        """Shape (), float64: `loss.item()` is the logged number to the bit. None where the step gave no loss."""
        value = self.get("loss")
        return None if value is None else torch.tensor(value, dtype=torch.float64)

    @property
    def metrics(self) -> dict[str, Any]:
        """The scalars but the loss."""
        return {name: value for name, value in self.items() if name != "loss"}

    def __float__(self) -> float:
        return float(self["loss"])


def whole(event: LoggedEvent) -> LoggedEvent:
    """The event itself, what was measured put back into its payload."""
    if event.observed is not None:
        event.payload = merge_measured(event.payload, event.observed)
    return event


def plain(value: Any) -> Any:
    """The value with numbers in place of "NaN", "Infinity" and "-Infinity"."""
    if type(value) is str:
        return NON_FINITE.get(value, value)
    if type(value) is dict:
        return {name: item if type(item) is float else plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if type(value) is list else value


def payload_of(event: Any, logged: LoggedEvent) -> Any:
    """What a handler of this event is given: its payload type's object, or plain values where only its name is known.

    Raises:
        RecordingError: the logged payload is none of that type.
    """
    kind = getattr(event, "payload_type", None)
    if kind is None:
        return plain(whole(logged).payload) if isinstance(event, str) else None
    try:
        return _reader(kind)(whole(logged).payload)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise RecordingError(
            f"{logged.event} of {logged.engine!r}, seq {logged.seq}: its payload {logged.payload!r} is no "
            f"{kind.__name__} ({error}); it was recorded with another version of that type"
        ) from error


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What makes a value of this annotation from its plain form."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(arguments)
    base = origin or kind
    if not isinstance(base, type):
        return plain
    if base is tuple:
        return _tuple_of(arguments)
    if base in (list, set, frozenset) or base is Sequence:
        item = _reader(arguments[0]) if arguments else plain
        make: Any = list if base is Sequence else base
        return lambda value: make(map(item, value))
    if issubclass(base, Mapping):
        item = _reader(arguments[1]) if len(arguments) == 2 else plain
        return lambda value: {name: item(each) for name, each in value.items()}
    if issubclass(base, Enum):
        return lambda value: base[value]
    if issubclass(base, Path):
        return lambda value: base(value)
    if issubclass(base, BaseException):
        return _error
    if issubclass(base, Tensor):
        return _tensor
    if base is float:
        return plain
    return _fields_of(base)


def _fields_of(kind: type) -> Callable[[Any], Any]:
    fields = getattr(kind, "__dataclass_fields__", None)
    if fields is None and not hasattr(kind, "__struct_fields__"):
        return plain
    try:
        hints = typing.get_type_hints(kind, localns={"Tensor": Tensor})
    except NameError:  # an annotation that only type checkers can see
        hints = {}
    names = kind.__struct_fields__ if fields is None else [f for f in fields if fields[f].init]  # type: ignore[attr-defined]
    readers = {name: _reader(hints[name]) if name in hints else plain for name in names}
    return lambda value: kind(**{name: readers[name](item) for name, item in value.items()})


def _one_of(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    if Path in kinds:  # a string where it is a URL
        return lambda value: value if value is None or "://" in value else Path(value)
    readers = [_reader(kind) for kind in kinds if kind is not type(None)]
    reader = readers[0] if len(readers) == 1 else plain
    return lambda value: None if value is None else reader(value)


def _tuple_of(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    if not kinds or (len(kinds) == 2 and kinds[1] is ...):
        item = _reader(kinds[0]) if kinds else plain
        return lambda value: tuple(map(item, value))
    readers = [_reader(kind) for kind in kinds]
    return lambda value: tuple(read(item) for read, item in zip(readers, value, strict=True))


def _tensor(value: Any) -> Any:
    """Of shape (); NaN where the process was killed before the value came to the host. Other shapes are not logged."""
    if type(value) is dict:
        return value
    return torch.tensor(math.nan if value is None else plain(value), dtype=torch.float64)


def _error(value: Mapping[str, Any]) -> BaseException:
    """An exception of the same name and text; of the builtin type, where it was one."""
    name = str(value["__type__"]).rpartition(".")[2]
    base = getattr(builtins, name, Exception)
    message = value.get("message", "")
    kind = type(name, (base,), {"__str__": lambda self: message})
    try:
        error: BaseException = kind(message)
    except TypeError:  # one that takes more than a text
        error = type(name, (Exception,), {})(message)
    return error
