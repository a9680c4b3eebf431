"""Batches for trial training steps; the training loader loses none of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from pulsetrain.engine.data import rng
from pulsetrain.engine.data.keyed_loader import KeyedLoader, can_be_keyed, can_be_read_once, key_order
from pulsetrain.engine.data.workers import workers_begin
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["copy_of_loader", "endless"]


def copy_of_loader(loader: Any) -> Any:
    """A loader that gives the same batches, and leaves the position of this one unchanged.

    A list of batches is shared, and so is the map-style dataset of a DataLoader; anything else is copied.

    Raises:
        ConfigurationError: the loader can be read only once, or cannot be copied.

    >>> copy_of_loader([1, 2])
    [1, 2]
    """
    if type(loader) in (list, tuple):
        return loader
    remedy = "and training would miss the batches that are read now; pass loader="
    if can_be_read_once(loader):
        raise ConfigurationError(f"it can be read only once, {remedy}", train_loader=type(loader))
    try:
        if not isinstance(loader, DataLoader):
            return copy.deepcopy(loader)
        copied = copy.copy(loader)
        vars(copied)["_iterator"] = None  # the workers of a pass under way
        shared: dict[int, Any] = {id(loader.dataset): loader.dataset} if can_be_keyed(loader) else {}
        vars(copied).update(copy.deepcopy(vars(copied), shared))
        return copied
    except Exception as error:  # a file, a socket, a lock ...
        raise ConfigurationError(f"it cannot be copied ({error}), {remedy}", train_loader=type(loader)) from error


def endless(loader: Any, seed: int) -> Iterator[Any]:
    """The loader's batches, pass after pass, in the order of a run's passes if the seed decides it.

    Raises:
        ConfigurationError: the loader gives none.

    >>> list(itertools.islice(endless([1, 2], seed=0), 5))
    [1, 2, 1, 2, 1]
    """
    keyed = KeyedLoader(loader, seed) if can_be_keyed(loader) else None
    for number in itertools.count(1):
        given = False
        for batch in keyed.begin(number) if keyed is not None else _a_pass(loader, rng.derive(seed, number)):
            given = True
            yield batch
        if not given:
            raise ConfigurationError("gives no batch; give it data", train_loader=type(loader))


def _a_pass(loader: Iterable[Any], seed: int) -> Iterator[Any]:
    if type(loader) in (list, tuple):
        return iter(loader)
    key_order(loader, seed)
    with workers_begin(loader):
        return rng.Draws(seed).around(loader)
