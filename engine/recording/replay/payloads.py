"""From the plain values of a log to the objects that handlers get: typed payloads, outputs, errors."""

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
from pulsetrain.engine.recording.log.non_finite import parse_non_finite
from pulsetrain.engine.recording.log.records import LoggedEvent, merge_measured

__all__ = ["ReplayedOutput", "payload_of", "plain", "whole"]


class ReplayedOutput(dict[str, Any]):
    """The scalars of a step's output by name; the attribute `loss` is a tensor, as in the output of a step.

    >>> output = ReplayedOutput(loss=0.5, accuracy=0.75)
    >>> output["loss"], output.loss, output.metrics
    (0.5, tensor(0.5000, dtype=torch.float64), {'accuracy': 0.75})
    """

    @property
    def loss(self) -> Tensor | None:
        """Shape (), float64: `loss.item()` equals the logged number bit for bit. None if the step returned no loss."""
        value = self.get("loss")
        return None if value is None else torch.tensor(value, dtype=torch.float64)

    @property
    def metrics(self) -> dict[str, Any]:
        """The scalars without the loss."""
        return {name: value for name, value in self.items() if name != "loss"}

    def __float__(self) -> float:
        return float(self["loss"])


def whole(event: LoggedEvent) -> LoggedEvent:
    """The same event, with the measured fields merged into its payload."""
    if event.observed is not None:
        event.payload = merge_measured(event.payload, event.observed)
    return event


def plain(value: object) -> Any:
    """The value with numbers in place of "NaN", "Infinity" and "-Infinity".

    >>> plain({"loss": "NaN", "steps": [1, "-Infinity"]})
    {'loss': nan, 'steps': [1, -inf]}
    """
    if type(value) is dict:
        return {name: item if type(item) is float else plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if type(value) is list else parse_non_finite(value)


def payload_of(event: object, logged: LoggedEvent) -> Any:
    """The payload for handlers: an object of the event's payload type, or plain values if only its name is known.

    Raises:
        RecordingError: the logged payload does not fit that type.
    """
    kind = getattr(event, "payload_type", None)
    if kind is None:
        return plain(whole(logged).payload) if isinstance(event, str) else None
    own = getattr(kind, "__dataclass_fields__", None)
    noted = (
        [] if own is None or type(logged.observed) is not dict else [key for key in logged.observed if key not in own]
    )
    payload = whole(logged).payload
    if noted:  # what the recorder has noted besides
        payload = {name: value for name, value in payload.items() if name not in noted}
    try:
        return _reader(kind)(payload)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise RecordingError(
            f"{logged.event} of {logged.engine!r}, seq {logged.seq}: its payload {logged.payload!r} is not a "
            f"{kind.__name__} ({error}); it was recorded with another version of that type"
        ) from error


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """A function that makes a value of the annotated type from its plain form."""
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
        return base
    readers = ((BaseException, _error), (Tensor, _tensor), (float, plain))
    return next((reader for known, reader in readers if issubclass(base, known)), None) or _fields_of(base)


def _fields_of(kind: type) -> Callable[[Any], object]:
    fields = getattr(kind, "__dataclass_fields__", None)
    if fields is None and not hasattr(kind, "__struct_fields__"):
        return plain
    try:
        hints = typing.get_type_hints(kind, localns={"Tensor": Tensor})
    except NameError:  # an annotation imported for type checkers only
        hints = {}
    names = kind.__struct_fields__ if fields is None else [f for f in fields if fields[f].init]  # type: ignore[attr-defined]
    readers = {name: _reader(hints[name]) if name in hints else plain for name in names}
    return lambda value: kind(**{name: readers[name](item) for name, item in value.items()})


def _one_of(kinds: tuple[object, ...]) -> Callable[[Any], object]:
    if Path in kinds:  # a string if it is a URL
        return lambda value: value if value is None or "://" in value else Path(value)
    readers = [_reader(kind) for kind in kinds if kind is not type(None)]
    reader = readers[0] if len(readers) == 1 else plain
    return lambda value: None if value is None else reader(value)


def _tuple_of(kinds: tuple[object, ...]) -> Callable[[Any], object]:
    if not kinds or (len(kinds) == 2 and kinds[1] is ...):
        item = _reader(kinds[0]) if kinds else plain
        return lambda value: tuple(map(item, value))
    readers = [_reader(kind) for kind in kinds]
    return lambda value: tuple(read(item) for read, item in zip(readers, value, strict=True))


def _tensor(value: object) -> object:
    """Of shape (); NaN if the process was killed before the value was on the host. Other shapes are not logged."""
    if type(value) is dict:
        return value
    return torch.tensor(math.nan if value is None else plain(value), dtype=torch.float64)


def _error(value: Mapping[str, object]) -> BaseException:
    """An exception of the same name and text; of the same type if that is a builtin."""
    name = str(value["__type__"]).rpartition(".")[2]
    base = getattr(builtins, name, Exception)
    message = value.get("message", "")
    kind = type(name, (base,), {"__str__": lambda self: message})
    try:
        error: BaseException = kind(message)
    except TypeError:  # a type that needs more than a text
        error = type(name, (Exception,), {})(message)
    return error
