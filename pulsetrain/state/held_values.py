"""What objects hold that a run may depend on: their attributes, their classes' values, and what functions name."""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Container, Iterator, Mapping
from enum import Enum
from functools import _lru_cache_wrapper, cache, cached_property, partial, partialmethod, singledispatchmethod
from inspect import getattr_static
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from pulsetrain.state.object_graph import (
    LIBRARIES,
    attributes_of,
    held_by,
    is_installed,
    is_of_project,
    is_users,
    package_of,
)
from pulsetrain.state.part import keeps_state

__all__ = [
    "CACHES", "CONTAINERS", "FUNCTIONS", "PLAIN", "attributes_of_module", "filled", "is_cached", "is_plain", "names_in",
    "own_attributes", "values_of_class", "variables_of",
]  # fmt: skip

PLAIN = (bool, int, float, complex, str, bytes)
CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
FUNCTIONS = (FunctionType, MethodType, partial)
CACHES = (_lru_cache_wrapper,)  # functions that keep what they have returned

_NOTES = ("deprecation_warnings", "warnings_issued")  # what transformers has warned about
_OF_TYPES = (
    "builtins",
    "types",
    "typing",
)  # whose objects in a class are functions and aliases, where they are callable
_METHODS = (classmethod, staticmethod)
_BINDING = (*_METHODS, partialmethod, singledispatchmethod)  # descriptors that keep nothing
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME")


@cache  # not when this module is imported: to make an optimizer, torch imports its compiler
def _torchs() -> frozenset[str]:
    """The attributes of torch's base classes."""
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.0)
    return frozenset({*vars(nn.Module()), *vars(optimizer), "_opt_called", "_step_count"})


def own_attributes(holder: object) -> Iterator[tuple[str, object]]:
    """What a function holds, or another object's attributes, by name.

    Attributes of the user's own classes are included. Left out are attributes of torch's base classes, cached
    properties, transformers' notes on its warnings, and what libraries keep private: of the private attributes of an
    object from a library, only those are included that hold an object of the user's, or a function with arguments.
    """
    if isinstance(holder, FUNCTIONS):
        if isinstance(holder, partial) or is_users(holder):
            yield from (*_held_with_values(holder), *variables_of(holder), *getattr(holder, "__dict__", {}).items())
        elif isinstance(holder, MethodType):
            yield "", holder.__self__
        return
    of_library, iterated = is_installed(holder), hasattr(type(holder), "__iter__")
    streams = isinstance(holder, IterableDataset) and keeps_state(holder)
    for name, value in {**values_of_class(type(holder)), **attributes_of(holder)}.items():
        if name in _torchs() or is_cached(holder, name):
            continue
        if of_library and name.startswith("_") and not _is_projects(holder, value):
            continue
        if name == "generator" and iterated:  # of a sampler: each pass seeds it
            continue
        if name in _NOTES and any(each.__module__.startswith("transformers.") for each in type(holder).__mro__):
            continue
        if streams and name.startswith("_"):  # its position in the pass, which is read again
            continue
        yield name, value


def attributes_of_module(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Its own attributes, without those that torch's weight norms and pruning derive from its parameters."""
    parameters = vars(module)["_parameters"]
    if isinstance(module, torch.jit.ScriptModule):  # whose numbers are not in python's attributes
        scripted: dict[str, object] = getattr(vars(module).get("_concrete_type"), "get_attributes", dict)()
        tensors = {*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))}
        yield from ((name, getattr(module, name)) for name in scripted.keys() - tensors - {"training"})
    for name, value in own_attributes(module):
        if f"{name}_orig" not in parameters and f"{name}_g" not in parameters:
            yield name, value


def values_of_class(kind: type) -> dict[str, object]:
    """The values and caches that the user's classes hold, and the code of static methods, which may be replaced."""
    found: dict[str, object] = {}
    for each in reversed(kind.__mro__):
        if (each.__module__ or "").partition(".")[0] not in LIBRARIES:
            private = ("__", "_abc") if is_of_project(each.__module__) else ("_",)
            found.update((name, value) for name, value in vars(each).items() if not name.startswith(private))
    static = {name: value.__func__ for name, value in found.items() if isinstance(value, staticmethod)}
    codes = {name: value.__code__ for name, value in static.items() if isinstance(value, FunctionType)}
    caches = {f"{name} (lru_cache)": value for name, value in _caches_of_class(kind)}
    return {name: value for name, value in found.items() if _is_value(value)} | codes | caches


def _caches_of_class(kind: type) -> Iterator[tuple[str, object]]:
    """The methods and properties of the user's classes that `functools.lru_cache` decorates, by name."""
    for each in reversed(kind.__mro__):
        for name, value in vars(each).items() if is_of_project(each.__module__ or "") else ():
            if isinstance(value, _METHODS):
                value = value.__func__
            elif isinstance(value, property):
                value = value.fget
            if isinstance(value, CACHES):
                yield name, value


def filled(cached: Any) -> int:
    """How many results a function has put into its cache, 0 if none is kept, or if the cache is a library's own."""
    module, name = getattr(cached, "__module__", None) or "", getattr(cached, "__name__", "")
    if not is_of_project(module) and getattr(sys.modules.get(module), name, None) is cached:
        return 0
    info = cached.cache_info()
    return int(info.misses) if info.currsize else 0


def _is_value(value: object) -> bool:
    """Whether an attribute of a class is a value, and not a method, a class, a property, a slot or a type's alias."""
    if isinstance(value, type) or hasattr(type(value), "__get__"):
        return False
    return not callable(value) or type(value).__module__ not in _OF_TYPES


def is_cached(holder: object, name: str) -> bool:
    """Whether an attribute is one that a descriptor of the class keeps, such as a cached property."""
    kept = getattr_static(type(holder), name, None)
    if isinstance(kept, (cached_property, *_BINDING)):
        return isinstance(kept, cached_property)
    accessor = hasattr(type(kept), "__get__") and not hasattr(type(kept), "__set__") and not callable(kept)
    return accessor and is_installed(kept)


def _is_projects(holder: object, value: object) -> bool:
    """Whether a private attribute of a library's object is a function with arguments, or an object of the user's."""
    if isinstance(value, partial):
        return True
    return is_users(value) if package_of(holder) in LIBRARIES else not is_installed(value)


def _held_with_values(function: object) -> Iterator[tuple[str, object]]:
    """What a function holds; of classes and modules in its closure, the values that they hold."""
    inner = function
    while isinstance(inner, (partial, MethodType)):
        inner = inner.func if isinstance(inner, partial) else inner.__func__
    names = names_in(inner.__code__)[1] if isinstance(inner, FunctionType) else frozenset()
    for name, value in held_by(function):
        yield name, value
        if name != "__class__":  # of super()
            yield from _of_namespace(name, value, names)


def variables_of(function: object) -> Iterator[tuple[str, object]]:
    """The variables of its module that a function names; of classes and modules among them, the values they hold."""
    code = getattr(function, "__code__", None)
    if code is None:  # a partial, or a callable that is not written in Python
        return
    variables, attributes = names_in(code)
    for name in sorted(variables & function.__globals__.keys()):  # type: ignore[attr-defined]  # which what has code has
        value = function.__globals__[name]  # type: ignore[attr-defined]
        yield name, value
        yield from _of_namespace(name, value, attributes)


@cache
def names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names of global variables in a function's code and the functions inside it, and all other names in them."""
    instructions = list(dis.get_instructions(code))
    variables = {str(each.argval) for each in instructions if each.opname in _GLOBAL}
    others = {*code.co_names}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            inner, names = names_in(each)
            variables |= inner
            others |= names
    return frozenset(variables), frozenset(others)


def _of_namespace(path: str, value: object, names: Container[str], depth: int = 2) -> Iterator[tuple[str, object]]:
    """The plain values of these names in a module of the user's, and those of the user's classes, by their paths."""
    if not depth or (isinstance(value, type) and issubclass(value, Enum)):
        return
    if isinstance(value, type) and is_of_project(value.__module__):
        yield from ((f"{path}.{name}", held) for name, held in values_of_class(value).items())
    elif not (isinstance(value, ModuleType) and is_of_project(value.__name__)):
        return
    for name, held in [*vars(value).items()]:
        if name in names and isinstance(held, (type, ModuleType)):
            yield from _of_namespace(f"{path}.{name}", held, names, depth - 1)
        elif name in names and isinstance(value, ModuleType) and is_plain(held):
            yield f"{path}.{name}", held


def is_plain(value: object) -> bool:
    """Whether it is a number, a text, a container, an array, or a function with a cache."""
    return isinstance(value, (*PLAIN, *CONTAINERS, *CACHES, Tensor, np.ndarray))
