"""Fingerprints: hashes of what objects hold, attribute by attribute, by which a later look finds what has changed."""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from enum import Enum
from functools import partial
from itertools import islice
from logging import Handler, Logger, LoggerAdapter
from pathlib import PurePath
from types import CodeType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from ignite.engine import Engine as IgniteEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from pulsetrain.engine import Engine, is_training_run
from pulsetrain.state.digests import (
    WHOLE,
    bits_of,
    bytes_of,
    counted_writes,
    digest,
    digest_of_jax,
    has_memory,
    is_of_jax,
    state_of_generator,
)
from pulsetrain.state.held_values import (
    CACHES,
    CONTAINERS,
    FUNCTIONS,
    PLAIN,
    attributes_of_module,
    filled,
    is_cached,
    own_attributes,
)
from pulsetrain.state.object_graph import GENERATORS, LIBRARIES, attributes_of, is_installed, is_users, package_of
from pulsetrain.state.part import keeps_state

__all__ = ["Fingerprint"]

DEPTH = 2  # how many containers and objects inside of each other are looked into
ELEMENTS = 10_000  # how many of an attribute
_STATE_DEPTH = 4  # of a state_dict: that of an optimizer is a dict of dicts of dicts
_TYPES = frozenset({*PLAIN, type(None)})
_FREQUENT = frozenset({dict, list, tuple, set})
_BYTES = (bytearray, memoryview, array)
_OPAQUE = (type, ModuleType, IgniteEngine, DataLoader, Logger, LoggerAdapter, Handler, threading.local)
_CONSTANT = (Enum, torch.dtype, torch.device, torch.Size, np.dtype, range, slice, re.Pattern, PurePath)
_SHORT = 64  # characters
_READ, _READ_OF_EACH = 1000, 256  # how many tensors inside of containers are read, and how many elements of each


class Fingerprint:
    """What attributes hold, as hashes; they are comparable in one process.

    Containers and objects are looked into to a depth of 2, and at most 10,000 elements of an attribute. Of tensors with
    more than a million elements, a sample of the elements and the version counter are compared; of tensors inside of
    containers, where they are in memory, the version counter, and a sample of the first 1,000 of them.

    >>> class Dataset: ...
    >>> dataset = Dataset()
    >>> dataset.cache, dataset.deep = {}, [[[[0]]]]
    >>> before, after = Fingerprint(), Fingerprint()
    >>> before.add_attributes("dataset", dataset)
    >>> dataset.cache["row"] = torch.zeros(2)
    >>> after.add_attributes("dataset", dataset)
    >>> after.changed_since(before), after.unseen
    (['dataset.cache'], {'dataset.deep'})

    Args:
        known: objects that are not looked into wherever they are found.
        reads_generators: whether to compare random generators.
    """

    def __init__(self, known: Iterable[object] = (), *, reads_generators: bool = True) -> None:
        self.hashes: dict[str, int] = {}
        self.unseen: set[str] = set()
        """Attributes that are too deep or too large to be seen whole."""
        self.reads_generators = reads_generators
        self._known = set(map(id, known))
        self._path, self._left, self._unread, self._elements = "", 0, 0, 0
        self._modules: set[nn.Module] = set()  # that were seen on this path

    def add(self, path: str, value: object) -> None:
        """Look at a value, and let `changed_since` call it by this path."""

        def summary() -> Hashable:
            if _is_read(value) and id(value) not in self._known:
                return digest(cast(Tensor, value))
            return self._summary(value, DEPTH)

        self._add(path, summary)

    def add_items(self, path: str, container: object) -> None:
        """Look at the items of a container, even of one that is not looked into where others hold it."""
        self._add(path, lambda: self._container(container, DEPTH))

    def _add(self, path: str, summary: Callable[[], Hashable]) -> None:
        self._path, self._left, self._unread, self._elements, self._modules = path, ELEMENTS, _READ, WHOLE, set()
        try:
            self.hashes[path] = hash(repr(summary()))  # hash(-1) == hash(-2)
        except Exception:  # raised by code of the user's: a mapping that cannot be iterated
            self.hashes[path] = 0
            self.unseen.add(path)

    def add_attributes(self, path: str, holder: object, without: Container[str] = ()) -> None:
        """Look at each attribute of an object, without those of these names."""
        try:
            for name, value in own_attributes(holder):
                if id(value) not in self._known and name not in without:
                    self.add(f"{path}.{name}", value)
        except Exception:  # raised by code of the user's
            self.unseen.add(path)
        if isinstance(holder, IterableDataset) and keeps_state(holder):  # perhaps its position, perhaps more
            self.unseen |= {f"{path}.{name}" for name in attributes_of(holder) if name.startswith("_")}
        kinds = type(holder).__mro__ if is_users(holder) else ()
        self.unseen |= {f"{path}.{each}" for kind in kinds for each in vars(kind) if is_cached(holder, each)}

    def changed_since(self, before: Fingerprint) -> list[str]:
        """The paths whose values differ, have come or are gone."""
        mine, theirs = self.hashes, before.hashes
        return sorted(path for path in mine.keys() | theirs.keys() if mine.get(path) != theirs.get(path))

    def _summary(self, value: object, depth: int) -> Hashable:
        """What has the same text for equal values; different types never have."""
        kind, name = type(value), id(type(value))
        if kind in _TYPES and kind is not int:
            return name, _brief(value)
        if isinstance(value, int):
            return name, hex(value)  # python refuses to write long ones as decimals
        if isinstance(value, PLAIN):  # of a class of the user's, which may have a text of its own
            return name, _brief(next(plain.__repr__(value) for plain in PLAIN if isinstance(value, plain)))
        self._left -= 1
        if self._left < 0:
            return self._not_seen(name)
        if id(value) in self._known:
            return name
        if kind in _FREQUENT:
            return self._container(value, depth)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            return name, value.shape, self._container(value.reshape(-1).tolist(), depth)
        if isinstance(value, np.generic) or _is_read(value):
            return self._array(np.asarray(value))
        if isinstance(value, _BYTES):
            return name, len(value), bytes_of(value)
        if isinstance(value, _OPAQUE):
            return self._engine(value) if isinstance(value, IgniteEngine) else name
        if isinstance(value, CONTAINERS) and not hasattr(kind, "close"):  # else it reads a file
            return self._container(value, depth), self._held_by_container(value, depth)
        try:
            return self._object(value, depth)
        except Exception:  # raised by code of the user's: a state_dict() that needs a batch, SystemRandom
            return self._not_seen(name)

    def _object(self, value: object, depth: int) -> Hashable:
        kind = id(type(value))
        function = isinstance(value, FUNCTIONS)
        if isinstance(value, CodeType):
            return kind, hash(value)
        if isinstance(value, CACHES):
            return kind, filled(value), self._summary(getattr(value, "__wrapped__", None), depth)
        if isinstance(value, GENERATORS):
            return (kind, state_of_generator(value)) if self.reads_generators else kind
        if not function and package_of(value) == "pulsetrain" and not keeps_state(value):
            return kind
        if hasattr(type(value), "close") or isinstance(value, np.memmap):  # which may be opened when it is first needed
            self.unseen.add(self._path)
            return id(type(None)), None
        if isinstance(value, _CONSTANT):
            return kind, str(value)
        if callable(getattr(value, "get_obj", None)) and package_of(value) == "multiprocessing":  # shared by processes
            return kind, bytes_of(value.get_obj())  # type: ignore[attr-defined]
        if is_of_jax(value):
            return kind, digest_of_jax(value)
        if isinstance(value, nn.Module):
            return kind, self._module(value, depth)
        if isinstance(value, _BaseDataLoaderIter):
            return kind, vars(value)["_num_yielded"]
        if keeps_state(value) and keeps_state(type(value)):  # else it answers to any name
            return kind, self._summary(value.state_dict(), _STATE_DEPTH)
        if not function and package_of(value) == "ignite":
            return kind
        if not function and is_installed(value) and package_of(value) not in LIBRARIES:
            return kind, self._of_package(value, depth)
        inside, name = dict(own_attributes(value)), _name_of(value) if function else ""
        if hasattr(type(value), "__next__") and package_of(value) in LIBRARIES and hasattr(value, "__dict__"):
            self.unseen.add(self._path)  # its position is private
        if inside:
            return kind, name, self._container(inside, depth)
        return (kind, name) if function or hasattr(value, "__dict__") else (kind, self._reduced(value, depth))

    def _engine(self, value: IgniteEngine) -> Hashable:
        """Of a second run: of a Trainer, how far it has come; an evaluator begins again each time that it is run."""
        self.unseen.add(self._path)
        far = (value.state.epoch, value.state.iteration) if isinstance(value, Engine) and is_training_run(value) else ()
        return id(type(value)), far

    def _of_package(self, value: object, depth: int) -> Hashable:
        """Of an object from an installed package: the cells of a table, or its public attributes."""
        if hasattr(type(value), "__array__") and 0 <= getattr(value, "size", -1) <= ELEMENTS:
            return self._summary(np.asarray(value), depth)
        held = attributes_of(value)
        if any(name.startswith("_") for name in held):
            self.unseen.add(self._path)  # what a package keeps private is often a cache
        inside = dict(own_attributes(value))
        return self._container(inside, depth) if inside or held else self._reduced(value, depth)

    def _module(self, value: nn.Module, depth: int) -> Hashable:
        """Of a module that no other part saves: its weights, and what each of its modules holds besides."""
        if value in self._modules:
            return None
        tensors = (*value.named_parameters(), *value.named_buffers())
        held = [(name, digest(each)) for name, each in tensors if id(each) not in self._known]
        found = []
        for path, each in value.named_modules(memo=self._modules):
            self._left -= 1
            if self._left < 0:
                self._not_seen()
                break
            if id(each) not in self._known:
                found.append((path, each.training, self._container(dict(attributes_of_module(each)), max(depth, 1))))
        return tuple(held), tuple(found)

    def _reduced(self, value: object, depth: int) -> Hashable:
        """Of an object without attributes, such as `itertools.count()`: what a pickle of it would hold."""
        reduced = value.__reduce_ex__(4)  # raises if it cannot be pickled
        return reduced if isinstance(reduced, str) else self._container(list(reduced[1:3]), depth + 1)

    def _tensor(self, value: Tensor) -> Hashable:
        """Of a tensor in a container: `.data` and inference mode write to it without counting."""
        if not has_memory(value):
            return id(value), counted_writes(value), tuple(value.shape)
        self._unread -= 1
        if self._unread >= 0 and 0 < value.numel() <= _READ_OF_EACH:  # all of it: an equal one may be another object
            return str(value.dtype), tuple(value.shape), bits_of(value.detach().reshape(-1))
        few: Hashable = None
        if self._unread >= 0 and value.numel():
            flat = value.detach().reshape(-1) if value.is_contiguous() else value.detach().flatten()[:_READ_OF_EACH]
            few = bits_of(flat[:: -(-flat.numel() // _READ_OF_EACH)])
        return value.data_ptr(), counted_writes(value), tuple(value.shape), few

    def _array(self, value: np.ndarray) -> Hashable:
        """Of an array in a container: all of it until so many elements have been read, then as of a tensor."""
        self._elements -= value.size
        if self._elements >= 0 or value.size <= _READ_OF_EACH:
            return digest(value)
        self._unread -= 1
        few = value.flat[:: -(-value.size // _READ_OF_EACH)].tobytes() if self._unread >= 0 else b""
        return str(value.dtype), value.shape, value.__array_interface__["data"][0], hash(few)

    def _held_by_container(self, value: object, depth: int) -> Hashable:
        """The attributes of a container of a class of the user's."""
        if is_installed(value) or (isinstance(value, tuple) and not hasattr(value, "__dict__")):
            return None
        return self._container(dict(own_attributes(value)), max(depth, 1))

    def _container(self, value: object, depth: int) -> Hashable:
        kind, size = id(type(value)), len(value)  # type: ignore[arg-type]  # every container has a length
        if size and not depth:
            return self._not_seen(kind, size)
        if isinstance(value, (dict, Mapping)):  # the former first: an abstract class takes longer
            pairs = list(islice(value.items(), self._left + 1))
            read: list[Any] = [(str(key), self._summary(each, depth - 1)) for key, each in pairs]
        else:
            items = list(islice(cast("Iterable[object]", value), self._left + 1))
            if _TYPES.issuperset(map(type, items)):  # without a call for each
                self._left -= len(items)
                read = [_brief(each) for each in items]
            else:
                read = [self._summary(each, depth - 1) for each in items]
            if isinstance(value, (set, frozenset)):  # whose order depends on how they were filled
                read = sorted(map(repr, read))
        if len(read) < size:
            self._not_seen(kind)
        return kind, size, tuple(read)

    def _not_seen(self, *what: object) -> Hashable:
        self.unseen.add(self._path)
        return what


def _brief(value: object) -> object:
    """A text as it is if it is short, or else its length and hash: a data set may hold its pictures as bytes."""
    if not isinstance(value, str | bytes) or len(value) <= _SHORT:
        return value
    return isinstance(value, str), len(value), hash(value)  # which text and bytes of the same characters share


def _name_of(function: object) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", "")


def _is_read(value: object) -> bool:
    """Whether it is an array of numbers that is in memory."""
    if isinstance(value, np.ndarray):
        return not (value.dtype.hasobject or isinstance(value, np.memmap))
    return isinstance(value, Tensor)
