"""Looks into objects: whose they are, what functions hold, and the random generators inside of them."""

from __future__ import annotations

import gc
import inspect
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch

from pulsetrain.engine.arrays import is_array

__all__ = [
    "GENERATORS", "LIBRARIES", "attributes_of", "generators_in", "held_by", "is_installed", "is_of_project", "is_users",
    "of_process", "package_of",
]  # fmt: skip

_Held = Iterable[tuple[str, object]]  # objects, each with its name or path

LIBRARIES = {"ignite", "torch", "numpy", "pulsetrain"} | sys.stdlib_module_names  # not the user's own packages
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, torch.Tensor, np.ndarray)
_DEPTH, _OBJECTS, _ITEMS = 8, 2000, 100  # how deep to look, at how many objects, and at how many items of each


def package_of(value: object) -> str:
    """The top-level package of an object's class, or of a function.

    >>> package_of(torch.nn.ReLU())
    'torch'
    """
    module = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    return (module or "").partition(".")[0]


def is_users(value: object) -> bool:
    """Whether an object's class, or a function, is the user's own: of none of the libraries below a run.

    >>> mine = type("Mine", (), {"__module__": "my_project"})()
    >>> is_users(torch.nn.ReLU()), is_users(mine)
    (False, True)
    """
    while isinstance(value, (partial, MethodType)):
        value = value.func if isinstance(value, partial) else value.__func__
    return package_of(value) not in LIBRARIES


def is_installed(value: object) -> bool:
    """Whether an object's class, or a function, comes from a library or an installed package."""
    while isinstance(value, (partial, MethodType)):
        value = value.func if isinstance(value, partial) else value.__func__
    module = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    return not is_of_project(str(module))


@cache
def is_of_project(module: str) -> bool:
    """Whether a module is the user's own: neither of the libraries below a run nor installed from a package.

    >>> is_of_project("torch.nn"), is_of_project("pytest")
    (False, False)
    """
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] not in LIBRARIES and not {"site-packages", "dist-packages"} & {*Path(file).parts}


def generators_in(parts: Mapping[str, object], known: Iterable[object] = ()) -> Iterator[str]:
    """The paths of the random generators inside of the parts, each generator once; those of the process are left out.

    >>> list(generators_in({"dataset": {"noise": [random.Random(0)]}}))
    ["dataset['noise'][0]"]

    Args:
        parts: by name; a generator that several hold gets the name of the first.
        known: objects to pass over.
    """
    walked = _walk(parts.items(), [*of_process(), *known])
    return (path for path, value in walked if issubclass(type(value), GENERATORS))


def of_process() -> list[object]:
    """The generators of the process: python's, numpy's and torch's, which a checkpoint holds."""
    held = [cast(MethodType, draw).__self__ for draw in (random.random, np.random.get_state)]
    return [*held, torch.default_generator]


def _walk(parts: _Held, known: Iterable[object]) -> _Held:
    """Each object that the parts hold, once and with its path."""
    seen = {id(each) for each in known}
    waiting = deque((path, value, 0) for path, value in parts)
    while waiting and len(seen) < _OBJECTS:
        path, value, steps = waiting.popleft()
        with suppress(Exception):  # raised by code of the user's: a mapping that cannot be iterated
            if isinstance(value, _LEAVES) or is_array(value) or id(value) in seen:
                continue
            seen.add(id(value))
            yield path, value
            if steps < _DEPTH:
                waiting.extend((f"{path}{step}", each, steps + 1) for step, each in _inside(value))


def _inside(value: object) -> _Held:
    """What a container, a function or another object holds, with the step in a path that leads there."""
    if isinstance(value, GENERATORS):
        return
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", each) for key, each in islice(value.items(), _ITEMS))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", each) for number, each in enumerate(islice(value, _ITEMS)))
    else:
        is_function = isinstance(value, (FunctionType, MethodType, partial))
        held = held_by(value) if is_function else attributes_of(value).items()
        yield from ((f".{name}" if name else "", each) for name, each in held)


def held_by(function: object) -> _Held:
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


def attributes_of(holder: object) -> dict[str, Any]:
    """Its own attributes, including those in slots, private ones by the names that python gives them.

    >>> class Counter:
    ...     __slots__ = ("__count", "unset", "__weakref__")
    ...     def __init__(self) -> None:
    ...         self.__count = 0
    >>> attributes_of(Counter())
    {'_Counter__count': 0}
    """
    values: dict[str, Any] = {}
    for kind in type(holder).__mro__:
        if "__slots__" not in vars(kind):
            continue
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType):
                with suppress(Exception):  # it is not set
                    values[name] = slot.__get__(holder)
    with suppress(Exception):  # code of the user's answers
        values.update(getattr(holder, "__dict__", {}))
    return values
