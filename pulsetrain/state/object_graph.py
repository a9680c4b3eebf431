"""Walks object graphs: the random generators inside of objects, and the objects that functions use."""

from __future__ import annotations

import gc
import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import cast

import numpy as np
import torch

from pulsetrain.state.handler_registry import attributes_of

__all__ = ["LIBRARIES", "generators_in", "objects_used", "package_of"]

_Held = Iterable[tuple[str, object]]  # objects, each with its name or path

LIBRARIES = {"ignite", "torch", "numpy", "pulsetrain"} | sys.stdlib_module_names  # not the user's own packages
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, torch.Tensor, np.ndarray)
_DEPTH, _OBJECTS, _ITEMS = 8, 2000, 100  # how deep to look, at how many objects, and at how many items of each


def package_of(value: object) -> str:
    """The top-level package of an object's class, or of a function.

    >>> package_of(torch.nn.ReLU())
    'torch'
    """
    module = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    return (module or "").partition(".")[0]


def generators_in(parts: Mapping[str, object], known: Iterable[object] = ()) -> Iterator[str]:
    """The paths of the random generators inside of the parts, each generator once; those of the process are left out.

    >>> list(generators_in({"dataset": {"noise": [random.Random(0)]}}))
    ["dataset['noise'][0]"]

    Args:
        parts: by name; a generator that several hold gets the name of the first.
        known: objects to pass over.
    """
    of_process = [cast(MethodType, draw).__self__ for draw in (random.random, np.random.get_state)]
    own = [*of_process, torch.default_generator]
    walked = _walk(parts.items(), _inside, _DEPTH, [*own, *known])
    return (path for path, value in walked if isinstance(value, _GENERATORS))


def objects_used(functions: Iterable[object]) -> list[object]:
    """What functions, and the functions that they use, hold or name: closures, defaults and variables of their module.

    The object of a bound method counts where the method is held, but not if it is one of `functions` itself.
    """
    own = [("", each.__func__ if isinstance(each, MethodType) else each) for each in functions]
    used = [value for _, value in _walk(own, _used, _OBJECTS) if not isinstance(value, (FunctionType, partial))]
    return [value.__self__ if isinstance(value, MethodType) else value for value in used]


def _walk(parts: _Held, inside: Callable[[object], _Held], depth: int, known: Iterable[object] = ()) -> _Held:
    """Each object that the parts hold, once and with its path; `inside` gives what an object holds, with the step."""
    seen = {id(each) for each in known}
    waiting = deque((path, value, 0) for path, value in parts)
    while waiting and len(seen) < _OBJECTS:
        path, value, steps = waiting.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        if steps < depth:
            waiting.extend((f"{path}{step}", each, steps + 1) for step, each in inside(value))


def _used(value: object) -> _Held:
    """What a function of the user's holds, and the variables of its module that it names."""
    if isinstance(value, partial):
        yield from _held_by(value)
    elif isinstance(value, FunctionType) and package_of(value) not in LIBRARIES:
        variables = value.__globals__
        yield from _held_by(value)
        yield from ((name, variables[name]) for name in value.__code__.co_names if name in variables)


def _inside(value: object) -> _Held:
    """What a container, a function or another object holds, with the step in a path that leads there."""
    if isinstance(value, _GENERATORS):
        return
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", each) for key, each in islice(value.items(), _ITEMS))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", each) for number, each in enumerate(islice(value, _ITEMS)))
    else:
        is_function = isinstance(value, (FunctionType, MethodType, partial))
        held = _held_by(value) if is_function else attributes_of(value).items()
        yield from ((f".{name}" if name else "", each) for name, each in held)


def _held_by(function: object) -> _Held:
    """What a function holds by name: its closure and defaults, its object, a partial's arguments."""
    if isinstance(function, MethodType):
        yield "", function.__self__
        function = function.__func__
    if isinstance(function, partial):
        yield "", function.func
        yield from ((str(number), each) for number, each in enumerate(function.args))
        yield from function.keywords.items()
    if isinstance(function, FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield from ((name, each) for each in gc.get_referents(cell))  # none if it is not filled yet
        parameters = inspect.signature(function).parameters
        yield from ((name, each.default) for name, each in parameters.items() if each.default is not each.empty)
