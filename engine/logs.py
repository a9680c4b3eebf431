"""Imports structlog on first use, without changing the user's random numbers."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["get_logger", "load_structlog"]


def load_structlog() -> ModuleType:
    """The module. If rich is installed, importing structlog draws from Python's generator, which training may use."""
    import random  # here, as readers of logs do without it

    state = random.getstate()
    try:
        import structlog
    finally:
        random.setstate(state)
    return structlog


def get_logger(name: str) -> FilteringBoundLogger:
    """A structlog logger with a name; the application configures how it writes, a library never does."""
    logger: FilteringBoundLogger = load_structlog().get_logger(name)
    return logger
