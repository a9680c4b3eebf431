"""Warns at the start of a run about state that its checkpoints cannot hold, instead of when it is resumed."""

from __future__ import annotations

from collections import deque

import numpy as np
from ignite.engine import Engine as IgniteEngine
from ignite.engine.events import RemovableEventHandle
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader

from pulsetrain.engine import Engine, Events, Phase, Subscription, TrainingRun, is_training_run
from pulsetrain.engine.checkpoint.plain import plain
from pulsetrain.engine.data.keyed_loader import can_be_read_once
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers import Checkpointer
from pulsetrain.state.data_cursor import DataCursor
from pulsetrain.state.handler_registry import HandlerRegistry, arguments_of, attributes_of, state_of
from pulsetrain.state.object_graph import LIBRARIES, generators_in, objects_used, package_of
from pulsetrain.state.part import keeps_state

__all__ = ["UnsavedState"]

_PROGRESS = (int, float, list, dict, set, deque, np.ndarray, Tensor)
_METHODS = ("state_dict", "load_state_dict")


class UnsavedState:
    """Warns about data, handlers and attributes that a resumed run would not find as they were.

    It does so only if the run has a Checkpointer.

    Args:
        registry: the handlers and other subscribers.
        data: refuses a loader's state that cannot be saved, when its first pass begins.
    """

    def __init__(self, registry: HandlerRegistry, data: DataCursor) -> None:
        self._registry, self._data = registry, data
        self._watched: dict[str, float] = {}  # numbers that no checkpoint holds, as they were when the run started

    def attach(self, engine: Engine) -> None:
        assert is_training_run(engine)
        self._run: TrainingRun = engine
        engine.add_event_handler(Events.STARTED, self._check, phase=Phase.COMPUTE)
        engine.add_event_handler(Events.CHECKPOINT_SAVED, self._report_changed_numbers, phase=Phase.OBSERVE)

    def _check(self) -> None:
        """Warn, and refuse states that could not be loaded again.

        Raises:
            CheckpointError: a state holds what could not be loaded again; the message says whose and where.
        """
        subscribers = self._registry.subscribers()
        self._registry.settings()  # of those that were attached since, as they are now
        saves = any(isinstance(handler, Checkpointer) for handler in subscribers)
        self._data.refuses_unsavable = saves
        self._watched = self._numbers() if saves else {}
        if not saves:
            return
        run = self._run
        _check_data(run.train_loader)
        for handler in subscribers:
            if package_of(handler) != "pulsetrain":
                _check_handler(handler)
        _check_half(run.strategy, "the strategy")
        self._check_functions()
        # one at a time: a check may copy numpy's arrays
        for name, part in (("model", run.model), ("optimizer", run.optimizer), ("strategy", run.strategy)):
            if keeps_state(part):
                plain({name: state_of(name, part)})
        for key, handler in self._registry.stateful().items():
            if package_of(handler) != "pulsetrain":
                plain({"handlers": {key: {"state": state_of(key, handler)}}})

    def _report_changed_numbers(self) -> None:
        """Warn about numbers that have changed since the run started and that the checkpoint just written lacks."""
        now = self._numbers() if self._watched else {}
        changed = sorted(name for name, number in self._watched.items() if now.get(name, number) != number)
        for name in changed:  # once
            del self._watched[name]
        if changed:
            get_logger("pulsetrain").warning(
                "attributes change during the run and are in no checkpoint: a resumed run starts with their first "
                "values; keep them in a buffer, get_extra_state() or state_dict()",
                attributes=changed,
            )

    def _numbers(self) -> dict[str, float]:
        """The numbers in attributes of the user's own modules and strategy that no state holds, by their path."""
        holders: dict[str, object] = {
            f"model.{name}".rstrip("."): module
            for name, module in self._run.model.named_modules()
            if package_of(module) not in LIBRARIES and type(module).get_extra_state is nn.Module.get_extra_state
        }
        if package_of(self._run.strategy) != "pulsetrain" and not keeps_state(self._run.strategy):
            holders["strategy"] = self._run.strategy
        torchs_own = vars(nn.Module())
        return {
            f"{path}.{name}": value
            for path, holder in holders.items()
            for name, value in attributes_of(holder).items()
            if type(value) in (int, float, bool) and value == value and name not in torchs_own
        }

    def _check_functions(self) -> None:
        """Warn about functions that subscribe and use an object whose state is saved only if its method subscribes."""
        run = self._run
        saved = [*self._registry.subscribers(), run.strategy, run.optimizer, run.backend, *run.model.modules()]
        known = {id(each) for each in saved}
        known |= {id(part) for each in saved for part in attributes_of(each).values()}
        for subscription in self._registry.subscriptions():
            for owner in objects_used([subscription.handler, *subscription.args, *subscription.kwargs.values()]):
                if keeps_state(owner) and id(owner) not in known and not _needs_no_saving(owner):
                    known.add(id(owner))  # warned about once
                    get_logger("pulsetrain").warning(
                        "a function that subscribes uses an object whose state is in no checkpoint: a resumed run "
                        "starts with a new one; subscribe a method of the object itself, or hold it in a handler with "
                        "state_dict() and load_state_dict()",
                        function=subscription.description,
                        object=type(owner).__name__,
                    )


def _check_data(loader: object) -> None:
    if can_be_read_once(loader) and not keeps_state(loader):
        get_logger("pulsetrain").warning(
            "the training data is an iterator, which can be read once: a run resumed from a checkpoint cannot continue "
            "exactly; give a DataLoader, an object whose __iter__ starts again, or one with state_dict() and "
            "load_state_dict()",
            loader=type(loader).__name__,
        )
    generators = _own_generators(loader)
    if generators:
        get_logger("pulsetrain").warning(
            "the training data holds random generators of its own, whose state is in no checkpoint: a resumed run "
            "draws other numbers from them; draw from random, numpy.random or torch, which are seeded for each batch",
            generators=generators,
        )


def _own_generators(loader: object) -> list[str]:
    """Where the loader's parts hold generators that no pass seeds, except in parts that keep their own state."""
    if not isinstance(loader, DataLoader):
        return [] if keeps_state(loader) else list(generators_in({"loader": loader}))
    parts = {name: getattr(loader, name) for name in ("dataset", "sampler", "batch_sampler", "collate_fn")}
    samplers = [parts["sampler"], parts["batch_sampler"]]
    samplers += [getattr(each, "sampler", None) for each in samplers]
    generators = [getattr(each, "generator", None) for each in samplers]
    seeded = [each for each in generators if isinstance(each, Generator)]  # each pass does
    skipped: list[object] = [each for each in parts.values() if keeps_state(loader) and keeps_state(each)]
    if getattr(loader.dataset, "draws_nothing", False) is True:
        skipped.append(loader.dataset)
    return list(generators_in(parts, [*seeded, *skipped]))


def _check_handler(handler: object) -> None:
    if _check_half(handler, "a handler") or keeps_state(handler) or package_of(handler) in LIBRARIES:
        return
    settings = arguments_of(handler)  # which a resumed run is given again
    attributes = sorted(
        name
        for name, value in attributes_of(handler).items()
        if isinstance(value, _PROGRESS) and name.lstrip("_") not in settings and not _subscribed(value)
    )
    if attributes:
        get_logger("pulsetrain").warning(
            "a handler has attributes that may be progress, and no state_dict(): a resumed run starts with their first "
            "values; give it state_dict() and load_state_dict(), which may return {} if there is nothing to keep",
            handler=type(handler).__name__,
            attributes=attributes,
        )


def _check_half(holder: object, what: str) -> bool:
    there = [name for name in _METHODS if callable(getattr(holder, name, None))]
    if len(there) != 1:
        return False
    (lacking,) = set(_METHODS) - set(there)
    get_logger("pulsetrain").warning(
        f"{what} has {there[0]}() and no {lacking}(): its state is not saved; give it both",
        handler=type(holder).__name__,
    )
    return True


def _needs_no_saving(owner: object) -> bool:
    if isinstance(owner, nn.Module):  # a teacher, or a metric
        return not any(parameter.requires_grad for parameter in owner.parameters())
    return isinstance(owner, (type, IgniteEngine, DataLoader))


def _subscribed(value: object) -> bool:
    """Whether it holds handles of subscriptions."""
    return isinstance(value, list) and any(isinstance(each, Subscription | RemovableEventHandle) for each in value)
