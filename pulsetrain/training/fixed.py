"""Attributes of a trainer that cannot be replaced, since its parts keep the object that they were made with."""

from __future__ import annotations

from typing import Any, NoReturn

from pulsetrain.engine import Engine
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.training.arguments import configured_schedules

__all__ = ["fix"]

_NEW = "make a new Trainer with it, or "
_INSTEAD = {
    "model": _NEW + "load other weights with model.load_state_dict(), or compile it in place with model.compile()",
    "optimizer": _NEW + "change the values in optimizer.param_groups",
    "strategy": _NEW + "change the attributes of the present one",
    "backend": "make a new Trainer with it",
    "train_loader": "set it between two runs, or let the data set change what it gives",
}


class _Fixed:
    """An attribute that cannot be replaced once the trainer has been made."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Engine | None, kind: type) -> object:
        if trainer is None:
            return self
        try:
            return vars(trainer)[self._name]
        except KeyError:
            raise AttributeError(f"{kind.__name__}: {self._name!r} has not been set yet") from None

    def __set__(self, trainer: Engine, value: object) -> None:
        held, name = vars(trainer), self._name
        if held.get("_is_made", False) and value is not held.get(name):
            if name != "train_loader" or trainer.is_running or trainer.is_paused:
                self._refuse("cannot be replaced", value)
            _measure(trainer, value)
        held[name] = value

    def __delete__(self, trainer: Engine) -> None:
        self._refuse("cannot be deleted", vars(trainer).get(self._name))

    def _refuse(self, rule: str, value: object) -> NoReturn:
        raise ConfigurationError(
            f"{rule}: the trainer would continue with the one that it has; {_INSTEAD[self._name]}",
            "Trainer",
            **{self._name: type(value)},
        )


def _measure(trainer: Any, loader: Any) -> None:
    """Measure the length of the next run over these batches.

    Raises:
        ConfigurationError: the configured schedule was made for another length, or a run over them could not learn.
    """
    length, config, optimizer = trainer.length, trainer.config, trainer.optimizer
    with length.over(loader) as before:
        length.measure(trainer.strategy, trainer.backend, trainer.agreement.control)
        length.check()
        schedules = [configured_schedules(config, optimizer, total) for total in (before, length.total_updates)]
        if schedules[0] != schedules[1]:
            raise ConfigurationError(
                f"the schedule {config.schedule!r} was made for a run of {before} updates, and one over this data has "
                f"{length.total_updates}; make a new Trainer with it",
                "Trainer",
                train_loader=type(loader),
            )


def fix(kind: type[Engine]) -> None:
    """Let a class refuse to replace or delete the attributes that its parts have been made with.

    Raises, when one is set or deleted: ConfigurationError.
    """
    for name in _INSTEAD:
        setattr(kind, name, _Fixed(name))
