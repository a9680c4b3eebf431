"""The class of each optimizer name; optional packages are imported on first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

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

# module, class, and the extra that installs the package
_OPTIONAL = {
    "lion": ("pulsetrain.engine.optimizers.lion", "Lion", "lion"),
    "schedule_free_adamw": ("schedulefree", "AdamWScheduleFree", "schedule-free"),
    "schedule_free_sgd": ("schedulefree", "SGDScheduleFree", "schedule-free"),
}

NAMES = (*_TORCH, *_OPTIONAL)


def optimizer_class(name: str) -> Callable[..., Optimizer]:
    """The class of an optimizer name; for "muon", the class that updates the matrices.

    >>> optimizer_class("adamw").__name__
    'AdamW'

    Raises:
        ConfigurationError: the name is unknown, or its package is not installed.
    """
    if name in _TORCH:
        found = getattr(torch.optim, _TORCH[name], None)
        if found is None:
            raise ConfigurationError(
                f"torch {torch.__version__} has no torch.optim.{_TORCH[name]}; "
                "pip install --upgrade torch (2.9 is the first with Muon)",
                "create_optimizer",
                name=name,
            )
        return found  # type: ignore[no-any-return]
    if name not in _OPTIONAL:
        raise unknown_name("create_optimizer", "name", name, NAMES)
    module, kind, extra = _OPTIONAL[name]
    try:
        return getattr(import_module(module), kind)  # type: ignore[no-any-return]
    except ImportError as error:
        raise ConfigurationError(
            f"needs a package that is not installed ({error}); pip install 'pulsetrain[{extra}]'",
            "create_optimizer",
            name=name,
        ) from error
