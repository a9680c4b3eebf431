"""What an object or a function reaches: random generators that it holds, objects that it uses."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from pulsetrain.state.handler_registry import attributes_of

__all__ = ["generators_in", "objects_reached"]

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, torch.Tensor, np.ndarray)
_DEPTH, _OBJECTS, _ITEMS = 8, 2000, 100  # looked at: how deep, altogether, and of one list
_LIBRARIES = {"ignite", "torch", "numpy", "engine", "handlers", "pulsetrain"} | sys.stdlib_module_names


def generators_in(parts: Mapping[str, Any], known: Iterable[Any] = ()) -> Iterator[str]:
    """The paths of the random generators that the parts hold, such as "dataset.transforms[1].rng", each once.

    The process's own are left out, which checkpoints hold.

    Args:
        parts: by name, those first in whose names a generator is told that several hold.
        known: objects that are passed over.
    """
    own = [random._inst, np.random.mtrand._rand, torch.default_generator]
    seen = {id(each) for each in [*own, *known]}
    waiting = [(value, name, 0) for name, value in parts.items()]
    while waiting and len(seen) < _OBJECTS:
        value, path, depth = waiting.pop(0)
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _GENERATORS):
            yield path
        elif depth < _DEPTH:
            waiting += [(each, f"{path}{step}", depth + 1) for step, each in _inside(value)]


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (FunctionType, MethodType, partial)):
        yield from ((f".{name}" if name else "", each) for name, each in _held_by(value))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", each) for key, each in islice(value.items(), _ITEMS))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", each) for number, each in enumerate(islice(value, _ITEMS)))
    else:
        yield from ((f".{name}", each) for name, each in attributes_of(value).items())


def _held_by(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function holds: its closure, its defaults, its object, a partial's arguments."""
    if isinstance(function, MethodType):
        yield "", function.__self__
        function = function.__func__
    if isinstance(function, partial):
        yield "", function.func
        yield from ((str(number), each) for number, each in enumerate(function.args))
        yield from function.keywords.items()
    if isinstance(function, FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not filled
                pass
        yield from _defaults(function)


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    values = function.__defaults__ or ()
    yield from zip(names[len(names) - len(values) :], values, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def objects_reached(functions: Iterable[Any]) -> list[Any]:
    """What these functions and those that they use hold, and the variables of their modules that they name.

    A bound method stands for its object where it is held, not where it is one of `functions` itself.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [each.__func__ if isinstance(each, MethodType) else each for each in functions]
    while waiting and len(seen) < _OBJECTS:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            if (value.__module__ or "").partition(".")[0] not in _LIBRARIES:
                waiting += [each for _, each in _held_by(value)] + _named_globals(value)
        elif isinstance(value, MethodType):
            found[id(value.__self__)] = value.__self__
        elif isinstance(value, partial):
            waiting += [each for _, each in _held_by(value)]
        elif not isinstance(value, _LEAVES):
            found[id(value)] = value
    return list(found.values())


def _named_globals(function: FunctionType) -> list[Any]:
    variables = function.__globals__
    return [variables[name] for name in function.__code__.co_names if name in variables]
