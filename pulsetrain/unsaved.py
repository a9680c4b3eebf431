"""What a run has that its checkpoints cannot hold, told when the run starts and not when it is resumed."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from ignite.engine.events import RemovableEventHandle
from torch import Tensor

from engine.batches import can_be_read_once
from engine.checkpoint.plain import plain
from engine.logs import get_logger
from engine.subscription import Subscription
from handlers import Checkpointer
from pulsetrain.resume import listeners, state_of, stateful

if TYPE_CHECKING:
    from pulsetrain.trainer import Trainer

__all__ = ["check_unsaved"]

_PACKAGES = {"engine", "handlers", "pulsetrain"}
_LIBRARIES = {"ignite", "torch"} | sys.stdlib_module_names  # whose classes nobody can give a method
_PROGRESS = (int, float, list, dict, set, deque, np.ndarray, Tensor)
_METHODS = ("state_dict", "load_state_dict")


def check_unsaved(trainer: Trainer) -> None:
    """Warn of data and handlers that a resume would not find as they were; without a Checkpointer none is meant.

    Raises:
        CheckpointError: a handler's state holds what could not be loaded again; it says whose and where.
    """
    heard_by = listeners(trainer)
    if not any(isinstance(handler, Checkpointer) for handler in heard_by):
        return
    _check_data(trainer.train_loader)
    for handler in heard_by:
        if _package(handler) not in _PACKAGES:
            _check_handler(handler)
    for key, handler in stateful(trainer).items():
        if _package(handler) not in _PACKAGES:  # one at a time: a check may copy numpy's arrays
            plain({"handlers": {key: state_of(key, handler)}})


def _check_data(loader: Any) -> None:
    if can_be_read_once(loader) and not all(hasattr(loader, each) for each in _METHODS):
        get_logger("pulsetrain").warning(
            "the training data is an iterator, which can be read once: a run resumed from a checkpoint cannot go on "
            "exactly; give a DataLoader, an object whose __iter__ begins anew, or one with state_dict() and "
            "load_state_dict()",
            loader=type(loader).__name__,
        )


def _check_handler(handler: Any) -> None:
    lacking = [name for name in _METHODS if not callable(getattr(handler, name, None))]
    if len(lacking) == 1:
        (there,) = set(_METHODS) - set(lacking)
        get_logger("pulsetrain").warning(
            f"a handler has {there}() and no {lacking[0]}(): its state is not saved; give it both",
            handler=type(handler).__name__,
        )
    elif lacking and _package(handler) not in _LIBRARIES:
        attributes = _progress(handler)
        if attributes:
            get_logger("pulsetrain").warning(
                "a handler has attributes that may be progress, and no state_dict(): a resumed run begins with them "
                "anew; give it state_dict() and load_state_dict(), where {} says that nothing is to be kept",
                handler=type(handler).__name__,
                attributes=attributes,
            )


def _package(handler: Any) -> str:
    return type(handler).__module__.partition(".")[0]


def _progress(handler: Any) -> list[str]:
    """The names of the attributes that may change as the run goes on, as far as their values tell.

    What is called as an argument of the constructor is taken for a setting, which a resumed run is given again.
    """
    slots = [vars(each).get("__slots__", ()) for each in type(handler).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    values = {name: getattr(handler, name) for name in names if hasattr(handler, name)}
    values.update(getattr(handler, "__dict__", {}))
    settings = inspect.signature(type(handler).__init__).parameters
    return sorted(
        name
        for name, value in values.items()
        if isinstance(value, _PROGRESS) and name.lstrip("_") not in settings and not _subscribed(value)
    )


def _subscribed(value: Any) -> bool:
    """Whether it holds what subscribing has returned."""
    return isinstance(value, list) and any(isinstance(each, Subscription | RemovableEventHandle) for each in value)
