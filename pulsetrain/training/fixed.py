"""Attributes of a trainer that cannot be replaced, since its parts keep the object that they were made with."""

from __future__ import annotations

from pulsetrain.engine import Engine
from pulsetrain.engine.errors import ConfigurationError

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
        is_made = held.get("_is_made", False) and value is not held.get(name)
        if is_made and (name != "train_loader" or trainer.is_running or trainer.is_paused):
            raise ConfigurationError(
                f"cannot be replaced: the trainer would continue with the one that it has; {_INSTEAD[name]}",
                "Trainer",
                **{name: type(value)},
            )
        held[name] = value


def fix(kind: type[Engine]) -> None:
    """Let a class refuse other values for the attributes that its parts have been made with.

    Raises, when one is set: ConfigurationError.
    """
    for name in _INSTEAD:
        setattr(kind, name, _Fixed(name))
