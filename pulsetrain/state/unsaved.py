"""What a run has that its checkpoints cannot hold, told when the run starts and not when it is resumed."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from ignite.engine import Engine as IgniteEngine
from ignite.engine.events import RemovableEventHandle
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader

from pulsetrain.engine.checkpoint.plain import plain
from pulsetrain.engine.data.keyed_loader import can_be_read_once
from pulsetrain.engine.events.subscription import Subscription
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers import Checkpointer
from pulsetrain.state.handler_registry import (
    arguments_of,
    attributes_of,
    handler_settings,
    heard,
    keeps_state,
    listeners,
    state_of,
    stateful,
    strategy_state,
)
from pulsetrain.state.object_graph import generators_in, objects_reached

if TYPE_CHECKING:
    from pulsetrain.trainer import Trainer

__all__ = ["check_unsaved", "tell_of_changed_numbers"]

_PACKAGES = {"engine", "handlers", "pulsetrain"}
_LIBRARIES = {"ignite", "torch"} | sys.stdlib_module_names  # whose classes nobody can give a method
_PROGRESS = (int, float, list, dict, set, deque, np.ndarray, Tensor)
_METHODS = ("state_dict", "load_state_dict")


def check_unsaved(trainer: Trainer) -> None:
    """Warn of data and handlers that a resume would not find as they were; without a Checkpointer none is meant.

    Raises:
        CheckpointError: a state holds what could not be loaded again; it says whose and where. A loader's is asked
            for when its first pass begins.
    """
    heard_by = listeners(trainer)
    handler_settings(trainer)  # of those that have been attached since, as they are now
    saves = any(isinstance(handler, Checkpointer) for handler in heard_by)
    trainer.position.refuses_unsavable = saves
    trainer.watched_numbers = _numbers(trainer) if saves else {}
    if not saves:
        return
    _check_data(trainer.train_loader)
    for handler in heard_by:
        if _package(handler) not in _PACKAGES:
            _check_handler(handler)
    _check_half(trainer.strategy, "the strategy")
    _check_functions(trainer)
    # one at a time: a check may copy numpy's arrays
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("model", trainer.model.state_dict),
        ("optimizer", trainer.optimizer.state_dict),
        ("strategy", partial(strategy_state, trainer)),
    ]
    for name, state in parts:
        plain({name: state()})
    for key, handler in stateful(trainer).items():
        if _package(handler) not in _PACKAGES:
            plain({"handlers": {key: state_of(key, handler)}})


def tell_of_changed_numbers(trainer: Trainer) -> None:
    """Warn of the numbers that have changed since the run started, and that the checkpoint just written lacks."""
    if not trainer.watched_numbers:
        return
    now = _numbers(trainer)
    changed = sorted(name for name, number in trainer.watched_numbers.items() if now.get(name, number) != number)
    for name in changed:  # once
        del trainer.watched_numbers[name]
    if changed:
        get_logger("pulsetrain").warning(
            "attributes change as the run goes on and are in no checkpoint: a resumed run begins with them anew; keep "
            "them in a buffer, get_extra_state() or state_dict()",
            attributes=changed,
        )


def _numbers(trainer: Trainer) -> dict[str, float]:
    """The numbers in attributes of the user's own modules and strategy, those that no state holds, by their path."""
    holders = {
        f"model.{name}".rstrip("."): module
        for name, module in trainer.model.named_modules()
        if _package(module) not in _LIBRARIES | _PACKAGES and type(module).get_extra_state is nn.Module.get_extra_state
    }
    if _package(trainer.strategy) not in _PACKAGES and not keeps_state(trainer.strategy):
        holders["strategy"] = trainer.strategy
    torchs_own = vars(nn.Module())
    return {
        f"{place}.{name}": value
        for place, holder in holders.items()
        for name, value in attributes_of(holder).items()
        if type(value) in (int, float, bool) and value == value and name not in torchs_own
    }


def _check_data(loader: Any) -> None:
    if can_be_read_once(loader) and not keeps_state(loader):
        get_logger("pulsetrain").warning(
            "the training data is an iterator, which can be read once: a run resumed from a checkpoint cannot go on "
            "exactly; give a DataLoader, an object whose __iter__ begins anew, or one with state_dict() and "
            "load_state_dict()",
            loader=type(loader).__name__,
        )
    held = _own_generators(loader)
    if held:
        get_logger("pulsetrain").warning(
            "the training data holds random generators of its own, whose state is in no checkpoint: a resumed run "
            "draws other numbers from them; draw from random, numpy.random or torch, which are seeded for each batch",
            generators=held,
        )


def _own_generators(loader: Any) -> list[str]:
    """Where the loader's parts hold generators that no pass seeds anew; what keeps its own state is left to it."""
    if not isinstance(loader, DataLoader):
        return [] if keeps_state(loader) else list(generators_in({"loader": loader}))
    parts = {name: getattr(loader, name) for name in ("dataset", "sampler", "batch_sampler", "collate_fn")}
    samplers = [parts["sampler"], parts["batch_sampler"]]
    samplers += [getattr(each, "sampler", None) for each in samplers]
    generators = [getattr(each, "generator", None) for each in samplers]
    seeded = [
        each for each in generators if isinstance(each, Generator)
    ]  # by pulsetrain.engine.data.keyed_loader, for each pass
    skipped = [each for each in parts.values() if keeps_state(loader) and keeps_state(each)]
    if getattr(loader.dataset, "draws_nothing", False) is True:
        skipped.append(loader.dataset)
    return list(generators_in(parts, [*seeded, *skipped]))


def _check_handler(handler: Any) -> None:
    if _check_half(handler, "a handler") or keeps_state(handler) or _package(handler) in _LIBRARIES:
        return
    attributes = _progress(handler)
    if attributes:
        get_logger("pulsetrain").warning(
            "a handler has attributes that may be progress, and no state_dict(): a resumed run begins with them "
            "anew; give it state_dict() and load_state_dict(), where {} says that nothing is to be kept",
            handler=type(handler).__name__,
            attributes=attributes,
        )


def _check_half(holder: Any, what: str) -> bool:
    there = [name for name in _METHODS if callable(getattr(holder, name, None))]
    if len(there) != 1:
        return False
    (lacking,) = set(_METHODS) - set(there)
    get_logger("pulsetrain").warning(
        f"{what} has {there[0]}() and no {lacking}(): its state is not saved; give it both",
        handler=type(holder).__name__,
    )
    return True


def _check_functions(trainer: Trainer) -> None:
    """Warn of functions that listen and reach an object whose state would have been saved had its method listened."""
    saved = [*listeners(trainer), trainer.strategy, trainer.optimizer, trainer.backend, *trainer.model.modules()]
    known = {id(each) for each in saved}
    known |= {id(part) for each in saved for part in attributes_of(each).values()}
    for subscription in heard(trainer):
        for owner in objects_reached([subscription.handler, *subscription.args, *subscription.kwargs.values()]):
            if keeps_state(owner) and id(owner) not in known and not _needs_no_saving(owner):
                known.add(id(owner))  # told once
                get_logger("pulsetrain").warning(
                    "a function that listens reaches an object whose state is in no checkpoint: a resumed run begins "
                    "with it anew; let a method of the object itself listen, or hold it in a handler with state_dict() "
                    "and load_state_dict()",
                    function=subscription.description,
                    object=type(owner).__name__,
                )


def _needs_no_saving(owner: Any) -> bool:
    if isinstance(owner, nn.Module):  # a teacher, or a metric
        return not any(parameter.requires_grad for parameter in owner.parameters())
    return isinstance(owner, (type, IgniteEngine, DataLoader))


def _package(handler: Any) -> str:
    return type(handler).__module__.partition(".")[0]


def _progress(handler: Any) -> list[str]:
    """The names of the attributes that may change as the run goes on, as far as their values tell.

    What is called as an argument of the constructor is taken for a setting, which a resumed run is given again.
    """
    settings = arguments_of(handler)
    return sorted(
        name
        for name, value in attributes_of(handler).items()
        if isinstance(value, _PROGRESS) and name.lstrip("_") not in settings and not _subscribed(value)
    )


def _subscribed(value: Any) -> bool:
    """Whether it holds what subscribing has returned."""
    return isinstance(value, list) and any(isinstance(each, Subscription | RemovableEventHandle) for each in value)
