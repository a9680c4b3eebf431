"""The class behind each optimizer name; those of optional packages are imported when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.optim import Optimizer

from pulsetrain.engine.errors import ConfigurationError, unknown_name

__all__ = ["NAMES", "optimizer_class"]

_TORCH = {
    "adamw": "AdamW",
    "adam": "Adam",
    "sgd": "SGD",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
    "nadam": "NAdam",
    "radam": "RAdam",
    "muon": "Muon",
}

# module, class, and the extra that installs what the module imports
_OPTIONAL = {
    "lion": ("pulsetrain.engine.optimizers.lion", "Lion", "lion"),
    "schedule_free_adamw": ("schedulefree", "AdamWScheduleFree", "schedule-free"),
    "schedule_free_sgd": ("schedulefree", "SGDScheduleFree", "schedule-free"),
}

NAMES = (*_TORCH, *_OPTIONAL)


def optimizer_class(name: str) -> Callable[..., Optimizer]:
    """The class of that name; for "muon", the class that updates its matrices.

    Raises:
        ConfigurationError: an unknown name, or one whose package is not installed.
    """
    if name in _TORCH:
        made_by: Any = getattr(torch.optim, _TORCH[name], None)
        if made_by is None:
            raise ConfigurationError(
                f"torch {torch.__version__} has no torch.optim.{_TORCH[name]}; "
                "pip install --upgrade torch (2.9 is the first with Muon)",
                "create_optimizer",
                name=name,
            )
        return made_by  # type: ignore[no-any-return]
    if name not in _OPTIONAL:
        raise unknown_name("create_optimizer", "name", name, NAMES)
    module, kind, extra = _OPTIONAL[name]
    try:
        return getattr(import_module(module), kind)  # type: ignore[no-any-return]
    except ImportError as error:
        raise ConfigurationError(
            f"needs a package that is not there ({error}); pip install 'pulsetrain[{extra}]'",
            "create_optimizer",
            name=name,
        ) from error
