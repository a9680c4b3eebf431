"""Whose state a checkpoint holds beside the trainer's own: handlers, callbacks, other listeners, and the strategy."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import PurePath
from types import FunctionType
from typing import TYPE_CHECKING, Any

from pulsetrain.engine.checkpoint import CheckpointUrl, Location
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.events.bus import EventSignal
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.subscription import Subscription
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers import Checkpointer

if TYPE_CHECKING:
    from pulsetrain.trainer import Trainer

__all__ = [
    "arguments_of", "attributes_of", "handler_settings", "handler_states", "heard", "keeps_state", "listeners",
    "restore_as_it_starts", "restore_states", "restore_strategy", "state_of", "stateful", "strategy_state",
    "tell_of_pairs",
]  # fmt: skip

_PLAIN = (str, int, float, bool, type(None))


def stateful(trainer: Trainer) -> dict[str, Any]:
    """What holds progress, by class name and metric, numbered where both come twice: those `listeners` with a state."""
    found: dict[str, Any] = {}
    for handler in listeners(trainer):
        if not keeps_state(handler):
            continue
        label = _label(handler)
        key, number = label, 1
        while key in found:
            number += 1
            key = f"{label}_{number}"
        found[key] = handler
    return found


def keeps_state(value: Any) -> bool:
    """Whether it has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def listeners(trainer: Trainer) -> list[Any]:
    """The trainer's handlers and callbacks, and whatever else hears its events, in the order of registration.

    An object hears by a method of its own or by being called: a metric of pytorch-ignite, a torch scheduler's `step`,
    an object of the user's. The trainer's own parts and those of handlers are left out.
    """
    given = [*trainer.handlers, *trainer.callbacks]
    own = [trainer, trainer.model, trainer.optimizer, trainer.evaluation, trainer.evaluator, trainer.callbacks]
    parts = {id(part) for part in [*own, trainer.strategy]}
    parts |= {id(part) for each in given for part in getattr(each, "__dict__", {}).values()}
    owners = {id(each): each for each in given}
    for subscription in heard(trainer):
        owner = _owner(subscription.handler)
        if owner is not None and id(owner) not in parts:
            owners.setdefault(id(owner), owner)
    return list(owners.values())


def heard(trainer: Trainer) -> list[Subscription]:
    """Every subscription of the trainer's events, in the order of registration."""
    signals = [signal for signal in trainer.bus.values() if isinstance(signal, EventSignal)]
    found = [each for signal in signals for each in signal.subscriptions(id(trainer), exclusive=True)]
    return sorted(found, key=lambda each: each.position)


def _owner(listener: Any) -> Any:
    """The object that hears by the listener; None for a function, which has no state."""
    while isinstance(listener, partial):
        listener = listener.func
    if isinstance(listener, FunctionType):
        return None
    owner = getattr(listener, "__self__", listener)
    return None if isinstance(owner, type) else owner


def handler_states(trainer: Trainer) -> dict[str, Any]:
    """The state of each that `stateful` names."""
    return {key: state_of(key, handler) for key, handler in stateful(trainer).items()}


def strategy_state(trainer: Trainer) -> Any:
    """The strategy's state; None where it keeps none."""
    return state_of("strategy", trainer.strategy) if keeps_state(trainer.strategy) else None


def state_of(key: str, handler: Any) -> Any:
    """A handler's state; its error is told with its name."""
    try:
        return handler.state_dict()
    except Exception as error:
        error.add_note(f"in {key}.state_dict(), whose state is part of a checkpoint")
        raise


def handler_settings(trainer: Trainer) -> dict[str, str]:
    """Beside each that `stateful` names what it was made with, as text: "EarlyStopping(val/loss): patience=5".

    It is what was there when the trainer first knew of the handler: a torch scheduler's last_epoch is an argument, too.
    """
    known = trainer.settings_at_first
    run_folder = next((each.folder for each in trainer.handlers if isinstance(each, Checkpointer)), None)
    texts = {}
    for key, handler in stateful(trainer).items():
        if known.get(id(handler), (None, ""))[0] is not handler:
            known[id(handler)] = handler, f"{_label(handler)}: {_settings(handler, run_folder)}"
        texts[key] = known[id(handler)][1]
    return texts


def restore_as_it_starts(trainer: Trainer, event: Event) -> None:
    """A metric begins anew at STARTED and EPOCH_STARTED; one that goes on inside an epoch gets its state back then."""
    saved = trainer.states_to_restore
    if saved is None:
        return
    epoch_started = event.type == Events.EPOCH_STARTED.value
    if trainer.position.inside or not epoch_started:
        restore_states(trainer, *saved)
    if epoch_started:
        trainer.states_to_restore = None


def restore_states(trainer: Trainer, states: Mapping[str, Any], settings: Mapping[str, str]) -> None:
    """Put back what holds progress; also once more, behind an event at which some of it begins anew.

    Args:
        states: what `handler_states` gave.
        settings: what `handler_settings` gave then; empty in older checkpoints.
    """
    handlers = stateful(trainer)
    for key, other in _pairs(handler_settings(trainer), states, settings).items():
        handlers[key].load_state_dict(states[other])


def tell_of_pairs(trainer: Trainer, states: Mapping[str, Any], settings: Mapping[str, str]) -> None:
    """Warn of handlers without a state, of states without a handler, and where only the order tells whose is whose."""
    now = handler_settings(trainer)
    pairs = _pairs(now, states, settings)
    log = get_logger("pulsetrain")
    for key in sorted(now.keys() - pairs.keys()):
        log.warning("handler begins anew", handler=key)
    for key in sorted(states.keys() - set(pairs.values())):
        log.warning("saved state of a handler that is not here any more", handler=key)
    unclear = list(_unclear(pairs, now, settings)) if settings else []
    if unclear:
        log.warning(
            "several handlers are of one class, and only their order tells whose saved state is whose; keep the order, "
            "or keep what tells them apart in an attribute called as the constructor's argument, or in one called name",
            handlers=unclear,
        )


def _pairs(now: Mapping[str, str], states: Mapping[str, Any], settings: Mapping[str, str]) -> dict[str, str]:
    """Whose saved state each handler gets: one made with the same settings, else one of the same class; in order."""
    if not settings:
        return {key: key for key in now if key in states}
    if settings.keys() != states.keys():
        odd = ", ".join(sorted(settings.keys() ^ states.keys()))
        raise CheckpointError(f"the checkpoint's handlers have a state or settings, not both: {odd}; load another one")
    pairs: dict[str, str] = {}
    left = dict(settings)
    for same in (_whole, _class):
        for key, text in now.items():
            found = next((other for other, theirs in left.items() if same(theirs) == same(text)), None)
            if key not in pairs and found is not None:
                pairs[key] = found
                del left[found]
    return pairs


def _unclear(pairs: Mapping[str, str], now: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[str]:
    alike = Counter(now.values()) | Counter(settings.values())
    of_a_class = Counter(map(_class, now.values())) | Counter(map(_class, settings.values()))
    for key, other in pairs.items():
        changed = now[key] != settings[other]
        if alike[now[key]] > 1 or (changed and of_a_class[_class(now[key])] > 1):
            yield key


def _whole(text: str) -> str:
    return text


def _class(text: str) -> str:
    return text.partition(": ")[0]


def _label(handler: Any) -> str:
    metric = getattr(handler, "metric", None)
    return f"{type(handler).__name__}({metric})" if isinstance(metric, str) else type(handler).__name__


def _settings(handler: Any, run_folder: Location | None) -> str:
    """The arguments of its constructor that it keeps as attributes, those that are plain; and its name.

    Paths are told from the run's folder on, which may be another when the run goes on.
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


def _path_from(run_folder: Location | None, path: Any) -> str:
    if isinstance(path, PurePath) and isinstance(run_folder, PurePath):
        return os.path.relpath(path, run_folder)
    return "." if path == run_folder else str(path)


def arguments_of(handler: Any) -> list[str]:
    """The names of its constructor's arguments."""
    try:
        return list(inspect.signature(type(handler).__init__).parameters)[1:]
    except (TypeError, ValueError):  # of C
        return []


def attributes_of(handler: Any) -> dict[str, Any]:
    """Its own attributes, those in slots as well."""
    slots = [vars(each).get("__slots__", ()) for each in type(handler).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    values = {name: getattr(handler, name) for name in names if hasattr(handler, name)}
    values.update(getattr(handler, "__dict__", {}))
    return values


def restore_strategy(trainer: Trainer, state: Any) -> None:
    """Give the strategy its state back.

    Raises:
        CheckpointError: it cannot take one.
    """
    strategy = trainer.strategy
    if state is not None and not keeps_state(strategy):
        raise CheckpointError(
            f"the checkpoint holds the state of a strategy, and {type(strategy).__name__} has no state_dict() and "
            "load_state_dict(); resume with the strategy that the run began with"
        )
    if state is not None:
        strategy.load_state_dict(state)
    elif keeps_state(strategy):
        get_logger("pulsetrain").warning("the strategy begins anew", strategy=type(strategy).__name__)
