"""Whether a value of a metric is the best so far: one judge for all that stop, keep or save by it."""

from __future__ import annotations

import math
from typing import Any, Literal

from engine.errors import ConfigurationError, unknown_name

__all__ = ["Mode", "check_judged", "is_better", "require_validation"]

Mode = Literal["min", "max"]


def is_better(value: float, best: float | None, mode: Mode, min_delta: float = 0.0) -> bool:
    """Whether the value is an improvement; NaN never is.

    Args:
        best: the best so far, None where there is none yet: then any number is.
        mode: whether smaller ("min") or larger ("max") is better.
        min_delta: an improvement is larger than this.
    """
    if math.isnan(value):
        return False
    if best is None:
        return True
    gain = best - value if mode == "min" else value - best
    return gain > min_delta


def check_judged(place: str, metric: object, mode: object) -> None:
    """Refuse what names no metric, and what is no mode.

    Args:
        place: the handler's class name, for messages.

    Raises:
        ConfigurationError: one of the two cannot be.
    """
    if not isinstance(metric, str) or not metric:
        raise ConfigurationError(f"{place}(metric={metric!r}): needs a metric's name, such as 'val/loss'")
    if mode not in ("min", "max"):
        raise unknown_name(place, "mode", mode, ("min", "max"))


def require_validation(place: str, metric: str, engine: Any) -> None:
    """Refuse a trainer that never validates.

    Raises:
        ConfigurationError: it has no validation set.
    """
    if not getattr(engine, "val_loaders", True):  # what is no trainer may validate by itself
        raise ConfigurationError(
            f"{place}(metric={metric!r}): waits for a validation, and the Trainer has no val_loader"
        )
