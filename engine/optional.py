"""Imports packages that are needed only by some of what this package does."""

from __future__ import annotations

import importlib
import random
from types import ModuleType

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["load_optional"]


def load_optional(place: str, module: str, extra: str) -> ModuleType:
    """Import the module. Python's random state stays as it is, though what the module imports may draw from it.

    Args:
        place: the class or command that needs it, for the message.
        module: such as "torch.utils.tensorboard".
        extra: the extra of this distribution that installs it.

    Raises:
        ConfigurationError: the module is not installed or cannot be imported.

    >>> load_optional("JSONLinesLogger", "json", "all").loads("[1]")
    [1]
    """
    state = random.getstate()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{place}: cannot import {module} ({error}); pip install 'pulsetrain[{extra}]'"
        ) from error
    finally:
        random.setstate(state)
