"""The objects that subscribe to a run's events: their states and their settings."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from itertools import count
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any

from ignite.metrics import Metric

from pulsetrain.engine import CheckpointError, ConfigurationError, Engine, Every, Subscription
from pulsetrain.engine.checkpoint import CheckpointManager, CheckpointUrl, Location
from pulsetrain.engine.checkpoint.pieces import whole
from pulsetrain.engine.events.bus import EventSignal
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers import Checkpointer, LRScheduler, ReduceLROnPlateau
from pulsetrain.state.object_graph import attributes_of, is_users, package_of
from pulsetrain.state.part import StateDict, Stateful, keeps_state

__all__ = ["HandlerRegistry", "arguments_of", "is_foreign", "owner_of", "plain_arguments", "state_of"]

_OWN = ("pulsetrain", "ignite")
_PLAIN = (str, int, float, bool, type(None))


class HandlerRegistry:
    """Knows the handlers, callbacks and other subscribers of an engine, and saves and restores their states.

    An object subscribes by a method of its own or by being called: a metric of pytorch-ignite, a torch scheduler's
    `step`, an object of the user's.

    Args:
        engine: to whose events they subscribe.
        handlers: what the run was given.
        callbacks: likewise.
    """

    engine: Engine
    handlers: Sequence[object]
    callbacks: Iterable[object]

    def __init__(self, engine: Engine, handlers: Sequence[object], callbacks: Iterable[object]) -> None:
        self.engine, self.handlers, self.callbacks = engine, handlers, callbacks
        self._own: list[object] = [engine, self, callbacks]  # the list keeps them alive, so that their ids stay theirs
        self._first_settings: dict[int, tuple[object, str]] = {}  # by id
        self._first_states: dict[str, object] = {}

    def leave_out(self, own: Iterable[object]) -> None:
        """These objects are the run's own, or their state is saved elsewhere."""
        self._own += own

    def remember(self) -> None:
        """Note states and settings as they are now: those of a run from the start."""
        self._first_states = self.states()
        self.settings()

    def listeners(self, *engines: Engine) -> list[tuple[Subscription, Callable[..., object]]]:
        """Who hears these engines, also by a subscription to every engine, in the order of registration.

        Each subscription with what it calls, which for a plain receiver of blinker is the receiver. Without an
        argument, the engines are the run's own and its evaluator.
        """
        signals = [signal for signal in self.engine.bus.values() if isinstance(signal, EventSignal)]
        found = {
            id(each): (each, handler)
            for engine in engines or self._engines()
            for signal in signals
            for each, handler in signal.listeners(id(engine))
        }
        return sorted(found.values(), key=lambda pair: pair[0].position)

    def files_to_sync(self) -> list[Path]:
        """What the subscribers name as files that have to be on disk before a checkpoint."""
        # asked of the class: an instance may answer to any name
        methods = ((each, getattr(type(each), "files_to_sync", None)) for each in self.subscribers())
        return [path for each, method in methods if method is not None for path in method(each)]

    def subscribers(self) -> list[object]:
        """Handlers, callbacks and other objects that subscribe, in the order of registration.

        The run's own parts and those of handlers are left out, and so are functions, which have no state.
        """
        given = [*self.handlers, *self.callbacks]
        parts = set(map(id, self._own))
        parts |= {id(part) for each in given for part in getattr(each, "__dict__", {}).values()}
        owners = {id(each): each for each in given}
        parts |= set(map(id, self.metrics()))
        for _, handler in self.listeners():
            owner = owner_of(handler)
            if owner is not None and id(owner) not in parts:
                owners.setdefault(id(owner), owner)
        return list(owners.values())

    def metrics(self) -> list[object]:
        """The metrics that listen to the evaluator alone, each pass of which resets them."""
        engine, *others = self._engines()
        owners = [owner_of(handler) for other in others for _, handler in self.listeners(other)]
        found = [*getattr(engine, "val_metrics", {}).values(), *(each for each in owners if isinstance(each, Metric))]
        elsewhere = {id(owner_of(handler)) for _, handler in self.listeners(engine)}
        return list({id(each): each for each in found if id(each) not in elsewhere}.values())

    def saved(self) -> list[object]:
        """What is saved or compared as a handler: the run's own parts, and the subscribers but those of libraries."""
        subscribers = self.subscribers()
        return [*self._own, *(each for each in subscribers if not is_foreign(each))]

    def stateful(self) -> dict[str, Stateful]:
        """The subscribers that keep state, by class name and metric, numbered where two have the same name."""
        found: dict[str, Stateful] = {}
        for handler in filter(keeps_state, self.subscribers()):
            label = _label(handler)
            keys = (label if number == 1 else f"{label}_{number}" for number in count(1))
            found[next(key for key in keys if key not in found)] = handler
        return found

    def states(self) -> dict[str, Any]:
        """The state of each that `stateful` names."""
        return {key: state_of(key, handler) for key, handler in self.stateful().items()}

    def settings(self) -> dict[str, str]:
        """What each that `stateful` names was made with, as text: "EarlyStopping(val/loss): patience=5".

        This is read when the registry first sees a handler: a torch scheduler's last_epoch is an argument, too.
        """
        known = self._first_settings
        run_folder = next((each.folder for each in self.handlers if isinstance(each, Checkpointer)), None)
        texts = {}
        for key, handler in self.stateful().items():
            if id(handler) not in known:  # which keeps it alive, so that the id stays its own
                known[id(handler)] = handler, f"{_label(handler)}: {_settings(handler, run_folder)}"
            texts[key] = known[id(handler)][1]
        return texts

    def sets_learning_rates(self) -> bool:
        """Whether a handler sets the optimizer's learning rates."""
        return any(isinstance(handler, (LRScheduler, ReduceLROnPlateau)) for handler in self.handlers)

    def checkpointer(self, asked_by: str) -> Checkpointer:
        """The one handler that saves checkpoints.

        Raises:
            ConfigurationError: there is none, or there are several; the message names the method that asked.
        """
        found: list[Any] = [
            each for each in self.handlers if isinstance(getattr(each, "manager", None), CheckpointManager)
        ]
        if len(found) != 1:
            raise ConfigurationError(
                f"Trainer.{asked_by}: needs exactly one Checkpointer among the handlers, and there are {len(found)}; "
                "pass handlers=[Checkpointer('runs/a')], or name the checkpoint's path"
            )
        checkpointer: Checkpointer = found[0]
        return checkpointer

    def reset(self) -> None:
        """Give each subscriber the state that it had when the registry first saw it."""
        for key, handler in self.stateful().items():
            if key in self._first_states:
                _load(key, handler, self._first_states[key])
            else:  # it was attached later, and has seen no run yet
                self._first_states[key] = state_of(key, handler)

    def state_dict(self) -> dict[str, StateDict]:
        settings = self.settings()
        return {key: {"settings": settings[key], "state": state} for key, state in self.states().items()}

    def load_state_dict(self, state: Mapping[str, StateDict]) -> None:
        """Restore the subscribers, each from the saved one with the same settings, or else of the same class."""
        handlers = self.stateful()
        for key, other in _pairs(self.settings(), _texts(state)).items():
            try:
                _load(key, handlers[key], state[other]["state"])
            except KeyError as error:
                raise CheckpointError(
                    f"the checkpoint's state of the handler {key} lacks {error}; load another checkpoint, or let its "
                    "load_state_dict() use a default where the entry is missing"
                ) from error

    def _engines(self) -> list[Engine]:
        evaluator: Engine | None = getattr(self.engine, "evaluator", None)
        return [self.engine] if evaluator is None else [self.engine, evaluator]

    def report_pairs(self, state: Mapping[str, Mapping[str, object]]) -> None:
        """Warn about subscribers without a saved state, states without a subscriber, and pairs that are a guess."""
        now, saved = self.settings(), _texts(state)
        pairs = _pairs(now, saved)
        log = get_logger("pulsetrain")
        for key in sorted(now.keys() - pairs.keys()):
            log.warning("the checkpoint has no state for a handler, which starts from its beginning", handler=key)
        for key in sorted(saved.keys() - set(pairs.values())):
            log.warning("the checkpoint has the state of a handler that the run does not have", handler=key)
        unclear = list(_unclear(pairs, now, saved)) if any(saved.values()) else []
        if unclear:
            log.warning(
                "several handlers are of one class, and only their order says whose saved state is whose; keep the "
                "order, or keep what distinguishes them in an attribute named as the constructor's argument, or in one "
                "called name",
                handlers=unclear,
            )


def state_of(key: str, handler: Stateful) -> Any:
    """A handler's state; an error gets a note with its name."""
    try:
        return handler.state_dict()
    except Exception as error:
        error.add_note(f"in {key}.state_dict(), whose state is part of a checkpoint")
        raise


def _load(key: str, handler: Stateful, state: object) -> None:
    """Restore a handler's state; an error gets a note with its name."""
    try:
        handler.load_state_dict(state if getattr(handler, "reads_pieces", False) else whole(state))
    except Exception as error:
        error.add_note(f"in {key}.load_state_dict()")
        raise


def arguments_of(handler: object) -> list[str]:
    """The names of its constructor's arguments.

    >>> arguments_of(Every(epochs=1))
    ['iterations', 'epochs', 'updates', 'seconds']
    """
    try:
        return list(inspect.signature(type(handler).__init__).parameters)[1:]
    except (TypeError, ValueError):  # of C
        return []


def plain_arguments(made: object) -> dict[str, str]:
    """The arguments of an object's constructor that it keeps as attributes, as text, if they are plain values.

    >>> plain_arguments(Every(epochs=1))["epochs"]
    '1'
    """
    attributes, found = attributes_of(made), dict[str, str]()
    for name in arguments_of(made):
        value = attributes.get(name, ...)
        try:
            text = repr(value) if type(value) in _PLAIN or is_dataclass(type(value)) else " at 0x"
        except Exception:  # a user's object, or a number of thousands of digits
            continue
        if " at 0x" not in text:
            found[name] = text
    return found


def owner_of(subscriber: Callable[..., object]) -> object | None:
    """The object whose method subscribes, or that is called itself; None for a function."""
    while isinstance(subscriber, partial):
        subscriber = subscriber.func
    if isinstance(subscriber, FunctionType):
        return None
    owner = getattr(subscriber, "__self__", subscriber)
    return None if owner is None or isinstance(owner, (type, ModuleType)) else owner


def is_foreign(subscriber: object) -> bool:
    """Whether it is an object without a state of a library below a run, such as a list whose `append` subscribes."""
    return not keeps_state(subscriber) and not is_users(subscriber) and package_of(subscriber) not in _OWN


def _texts(state: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {key: entry["settings"] for key, entry in state.items()}


def _pairs(now: Mapping[str, str], saved: Mapping[str, str]) -> dict[str, str]:
    """Whose saved state each handler gets: one made with the same settings, else one of the same class; in order."""
    if not any(saved.values()):  # a checkpoint of before settings were saved
        return {key: key for key in now if key in saved}
    pairs: dict[str, str] = {}
    left = dict(saved)
    for same in (str, _class):  # the whole text, then the class
        for key, text in now.items():
            found = next((other for other, theirs in left.items() if same(theirs) == same(text)), None)
            if key not in pairs and found is not None:
                pairs[key] = found
                del left[found]
    return pairs


def _unclear(pairs: Mapping[str, str], now: Mapping[str, str], saved: Mapping[str, str]) -> Iterator[str]:
    alike = Counter(now.values()) | Counter(saved.values())
    of_a_class = Counter(map(_class, now.values())) | Counter(map(_class, saved.values()))
    for key, other in pairs.items():
        changed = now[key] != saved[other]
        if alike[now[key]] > 1 or (changed and of_a_class[_class(now[key])] > 1):
            yield key


def _class(text: str) -> str:
    return text.partition(": ")[0]


def _label(handler: object) -> str:
    metric = getattr(handler, "metric", None)
    return f"{type(handler).__name__}({metric})" if isinstance(metric, str) else type(handler).__name__


def _settings(handler: object, run_folder: Location | None) -> str:
    """The arguments of its constructor that it keeps as attributes, if they are plain; and its name.

    Paths are relative to the run's folder, which may be another one when the run resumes.
    """
    attributes = attributes_of(handler)
    found = []
    for name in dict.fromkeys([*arguments_of(handler), "name"]):
        value = attributes.get(name, attributes.get(f"_{name}", ...))
        if isinstance(value, PurePath | CheckpointUrl):
            found.append(f"{name}={_path_from(run_folder, value)}")
        elif type(value) in _PLAIN or isinstance(value, Every):
            found.append(f"{name}={value!r}")
    return ", ".join(found)


def _path_from(run_folder: Location | None, path: Location | PurePath) -> str:
    if isinstance(path, PurePath) and isinstance(run_folder, PurePath):
        return os.path.relpath(path, run_folder)
    return "." if path == run_folder else str(path)
