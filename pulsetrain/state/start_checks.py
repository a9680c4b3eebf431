"""Warns at the start of a run about data and handlers whose state could not be restored."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Generator
from torch.utils.data import DataLoader

from pulsetrain.engine.data.loaders import can_be_read_once
from pulsetrain.engine.logs import get_logger
from pulsetrain.state.object_graph import generators_in
from pulsetrain.state.part import keeps_state

__all__ = ["check_data", "check_half"]

_METHODS = ("state_dict", "load_state_dict")


def check_data(what: str, loader: object, known: Sequence[object] = ()) -> None:
    """Warn about data that can be read once, and about generators that no pass seeds."""
    if can_be_read_once(loader) and not keeps_state(loader):
        get_logger("pulsetrain").warning(
            f"{what} is an iterator, which can be read only once: a run resumed from a checkpoint cannot continue "
            "exactly; give a DataLoader, an object whose __iter__ starts again, or one with state_dict() and "
            "load_state_dict()",
            loader=type(loader).__name__,
        )
    generators = _own_generators(loader, known)
    if generators:
        get_logger("pulsetrain").warning(
            f"{what} holds random generators of its own, whose state is in no checkpoint: a resumed run "
            "draws other numbers from them; draw from random, numpy.random or torch, whose states a run restores",
            generators=generators,
        )


def _own_generators(loader: object, known: Sequence[object] = ()) -> list[str]:
    """Where the loader's parts hold generators that no pass seeds, except in parts that keep their own state."""
    if not isinstance(loader, DataLoader):
        return [] if keeps_state(loader) else list(generators_in({"loader": loader}, known))
    parts = {name: getattr(loader, name) for name in ("dataset", "sampler", "batch_sampler", "collate_fn")}
    samplers = [parts["sampler"], parts["batch_sampler"]]
    samplers += [getattr(each, "sampler", None) for each in samplers]
    generators = [getattr(each, "generator", None) for each in samplers]
    seeded = [each for each in generators if isinstance(each, Generator)]  # each pass does
    skipped: list[object] = [each for each in parts.values() if keeps_state(loader) and keeps_state(each)]
    if getattr(loader.dataset, "draws_nothing", False) is True:
        skipped.append(loader.dataset)
    return list(generators_in(parts, [*seeded, *skipped, *known]))


def check_half(holder: object, what: str) -> None:
    """Warn about an object with only one of the two methods of a state."""
    there = [name for name in _METHODS if callable(getattr(holder, name, None))]
    if len(there) != 1:
        return
    (lacking,) = set(_METHODS) - set(there)
    get_logger("pulsetrain").warning(
        f"{what} has {there[0]}() and no {lacking}(): its state is not saved; give it both",
        handler=type(holder).__name__,
    )
