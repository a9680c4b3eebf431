"""The class of each optimizer name; optional packages are imported on first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final

import torch
from torch.optim import Optimizer

from pulsetrain.engine.errors import ConfigurationError, unknown_name

__all__ = ["CREATE", "NAMES", "optimizer_class", "refused"]

CREATE: Final = "create_optimizer"  # the place of most errors

_CLASSES = ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Muon")
_TORCH = {kind.lower(): kind for kind in _CLASSES}

# module, class, and the extra that installs the package
_OPTIONAL = {
    "lion": ("pulsetrain.engine.optimizers.lion", "Lion", "lion"),
    "schedule_free_adamw": ("schedulefree", "AdamWScheduleFree", "schedule-free"),
    "schedule_free_sgd": ("schedulefree", "SGDScheduleFree", "schedule-free"),
}

NAMES = (*_TORCH, *_OPTIONAL)


def refused(rule: str, **arguments: object) -> ConfigurationError:
    """The error of `create_optimizer` for an argument, which comes first; see `ConfigurationError`."""
    return ConfigurationError(rule, CREATE, **arguments)


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
            raise refused(
                f"torch {torch.__version__} has no torch.optim.{_TORCH[name]}; "
                "pip install --upgrade torch (2.9 is the first with Muon)",
                name=name,
            )
        return found  # type: ignore[no-any-return]
    if name not in _OPTIONAL:
        raise unknown_name("create_optimizer", "name", name, NAMES)
    module, kind, extra = _OPTIONAL[name]
    try:
        return getattr(import_module(module), kind)  # type: ignore[no-any-return]
    except ImportError as error:
        raise refused(
            f"needs a package that is not installed ({error}); pip install 'pulsetrain[{extra}]'",
            name=name,
        ) from error
