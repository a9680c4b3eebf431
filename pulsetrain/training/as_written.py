"""Errors about settings, under the names by which the user wrote them, such as TrainingConfig(schedule=...)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TypeAlias

from pulsetrain.engine import schedules
from pulsetrain.engine.errors import PulsetrainError

__all__ = ["as_written"]

Written: TypeAlias = tuple[str, object]  # the name of a setting, and its value
Rename: TypeAlias = Callable[[str, object], Written]

_OPTIMIZERS = ("create_optimizer", "create_functional", "create_optax", "resolve_optimizer")
_OF_OPTIMIZER = {
    "name": "optimizer",
    **{name: name for name in ("optimizer", "model", "learning_rate", "weight_decay", "no_decay")},
}
_OF_SCHEDULE = {
    "name": "schedule",
    "total_steps": "the run's total_steps",
    **{name: name for name in ("learning_rate", "warmup_steps", "min_lr_ratio")},
}
_OF_BACKEND = {"precision": "precision", "device": "device", "name": "precision"}
_OF_TRAINER = ("model", "backend")  # in place of the configuration

_SCHEDULES = {name: getattr(schedules, name) for name in schedules.__all__}
_RATES = {name: fields(each)[0].name for name, each in _SCHEDULES.items() if is_dataclass(each)}  # the first parameter


@contextmanager
def as_written(optimizer: object = None) -> Iterator[None]:
    """Within the block, an error about what a setting became names the setting.

    >>> from pulsetrain.engine.schedules import build_schedule
    >>> with as_written():
    ...     build_schedule("step", 0.1, total_steps=9, step_size=0)
    Traceback (most recent call last):
    pulsetrain.engine.errors.ConfigurationError: TrainingConfig(schedule_options={'step_size': 0}): needs at least 1 ...

    Args:
        optimizer: given to the Trainer in place of the configuration's.
    """
    try:
        yield
    except PulsetrainError as error:
        rename = _rename(error)
        if rename is None:
            raise
        first = "" if error.argument is None else rename(error.argument, None)[0]
        of_trainer = first in _OF_TRAINER or (first == "optimizer" and optimizer is not None)
        written = error.reworded(rename, place="Trainer" if of_trainer else "TrainingConfig")
        raise written.with_traceback(error.__traceback__) from error.__cause__


def _rename(error: PulsetrainError) -> Rename | None:
    """How the arguments of this error were written; None where they are the user's own already."""
    if error.place in _OPTIMIZERS:
        return lambda name, value: _option("optimizer_options", _OF_OPTIMIZER, name, value)
    if error.place == "build_schedule" or error.place in _RATES:
        known = {**_OF_SCHEDULE, _RATES.get(error.place, "learning_rate"): "learning_rate"}
        return lambda name, value: _option("schedule_options", known, name, value)
    if error.place == "TorchBackend" and [*error.arguments] == ["model"]:
        return lambda name, value: (name, value)
    is_setting = error.argument in ("precision", "device", "activation_checkpointing")
    if error.place == "Precision" or (is_setting and error.place in ("", "TorchBackend")):
        return lambda name, value: (_OF_BACKEND.get(name, name), value)
    return None


def _option(options: str, known: dict[str, str], name: str, value: object) -> Written:
    return (known[name], value) if name in known else (options, {name: value})
