"""structlog, imported when the first line is logged, and without an effect on the user's random numbers."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

__all__ = ["get_logger", "load_structlog"]


def load_structlog() -> ModuleType:
    """The module. Where rich is installed, importing it draws from Python's generator, which training may draw from."""
    state = random.getstate()
    try:
        import structlog
    finally:
        random.setstate(state)
    return structlog


def get_logger(name: str) -> Any:
    """A structlog logger of that name; how it writes is configured by the application, not by a library."""
    return load_structlog().get_logger(name)
