"""Imports the package of a service when a logger for it is made."""

from __future__ import annotations

import importlib
import random
from typing import Any

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["load_optional"]


def load_optional(place: str, module: str, extra: str) -> Any:
    """The module, without an effect on Python's random numbers, which what it imports may draw.

    Args:
        place: the logger's class name, for the message.
        module: such as "torch.utils.tensorboard".
        extra: of this distribution, that installs it.

    Raises:
        ConfigurationError: it is not installed, or cannot be imported.
    """
    state = random.getstate()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{place}: cannot import {module} ({error}); install it with `pip install pulsetrain[{extra}]`"
        ) from error
    finally:
        random.setstate(state)
