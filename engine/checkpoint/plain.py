"""The values that a checkpoint may hold: plain values, which can be loaded unchanged without running code."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from pulsetrain.engine.checkpoint.pieces import Piece
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.named_values import NamedValues

__all__ = ["Plain", "Step", "as_saved", "plain", "shown_path"]

Plain: TypeAlias = Any  # a value that a checkpoint may hold; those who load one index it freely
Step: TypeAlias = object  # of a path into a checkpoint: a key or an index

# types that torch.load(weights_only=True) reads back unchanged; it rejects their subclasses
_WHOLE = frozenset({str, bool, float, type(None), torch.Size, torch.dtype, torch.device, Piece})
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_KEYS = frozenset({str, bool, int, float, type(None)})
_INT_BITS = 2039  # of the largest integer that torch reads


def plain(checkpoint: Mapping[str, object]) -> dict[str, Plain]:
    """The checkpoint as torch.load(weights_only=True) will read it: unchanged parts are shared, numpy's are converted.

    >>> plain({"step": np.int64(3), "rates": np.ones(2)})
    {'step': 3, 'rates': tensor([1., 1.], dtype=torch.float64)}

    Raises:
        CheckpointError: it holds a value that could not be loaded again; the message says where.
    """
    try:
        content: dict[str, Plain] = _plain(dict(checkpoint), ())
    except RecursionError:
        raise CheckpointError("checkpoint: holds a container that is too deep, or that holds itself") from None
    return content


def _plain(value: Plain, path: tuple[Step, ...]) -> Plain:
    kind = type(value)
    if kind in _WHOLE or (kind is int and value.bit_length() <= _INT_BITS) or (kind is bytes and value):
        return value
    if kind in _TENSORS:
        attributes = _plain(vars(value), (*path, "__dict__"))  # torch saves them with the tensor
        if attributes is vars(value):
            return value
        # the same memory: the caller's tensor must not change
        return as_saved(value.detach(), kind is torch.nn.Parameter, value.requires_grad, attributes)
    if kind is NamedValues:
        return _plain(dict(value), path)
    if kind is dict or kind is OrderedDict:
        # a module's state_dict() keeps its versions in an attribute of the OrderedDict
        attributes = _plain(vars(value), (*path, "__dict__")) if kind is OrderedDict else None
        pairs = [(_plain_key(key, path), _plain(item, (*path, key))) for key, item in value.items()]
        same = all(new[0] is key and new[1] is item for new, (key, item) in zip(pairs, value.items(), strict=True))
        if same and (attributes is None or attributes is vars(value)):
            return value
        changed = kind(pairs)
        if attributes is not None:
            vars(changed).update(attributes)
        return changed
    if kind is list or kind is tuple:
        # floats are skipped without a call: a history has a million of them
        items = [x if type(x) is float else _plain(x, (*path, index)) for index, x in enumerate(value)]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else kind(items)
    if isinstance(value, np.generic) and type(value.item()) in (*_KEYS, bytes):
        return _plain(value.item(), path)
    if kind in (np.ndarray, np.memmap) and value.dtype.kind in "biufc":
        try:
            # a copy: the array may be read-only, reversed, or of the other byte order
            return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
        except TypeError:  # a dtype that torch does not have, such as longdouble
            pass
    raise _refusal(value, path)


def _plain_key(key: Plain, path: tuple[Step, ...]) -> Plain:
    if type(key) is tuple:
        parts = [_plain_key(part, path) for part in key]
        return key if all(a is b for a, b in zip(parts, key, strict=True)) else tuple(parts)
    if isinstance(key, np.generic):
        key = _plain(key, (*path, key))
    if type(key) not in _KEYS:
        raise _refusal(key, (*path, key), "key of type ")
    return _plain(key, (*path, key))


def as_saved(data: torch.Tensor, parameter: bool, requires_grad: bool, attributes: Mapping[str, Plain]) -> torch.Tensor:
    """The data as a tensor or a parameter with these attributes, which are saved with it."""
    made = torch.nn.Parameter(data, requires_grad) if parameter else data.requires_grad_(requires_grad)
    vars(made).update(attributes)
    return made


def shown_path(path: tuple[Step, ...]) -> str:
    """A path into a checkpoint, for an error message.

    >>> shown_path(("handlers", 0))
    "checkpoint['handlers'][0]"
    """
    return "checkpoint" + "".join(f"[{key!r}]" for key in path)


def _refusal(value: object, path: tuple[Step, ...], what: str = "") -> CheckpointError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, np.ndarray):
        name += f" of dtype {value.dtype}"
    elif kind is int:
        name += f" of more than {_INT_BITS} bits"
    elif kind is bytes and not value:
        name += " of length 0"
    return CheckpointError(
        f"{shown_path(path)}: {what}{name}: could not be loaded again; save tensors, strings, bytes, numbers and None, "
        "in dicts, lists and tuples, and build the object from them in load_state_dict()"
    )
