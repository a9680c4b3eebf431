"""Whether a value of a metric is the best so far: one judge for all that stop, keep or save by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from pulsetrain.engine.errors import ConfigurationError, MetricNotFoundError, unknown_name
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.metrics import canonical

__all__ = ["Mode", "check_judged", "is_better", "judged_name", "require_validation", "tell_of_silence"]

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


def judged_name(place: str, metric: str, engine: Any, event: Event) -> str | None:
    """The metric's full name in the payload of one of METRIC_EVENTS.

    Args:
        place: the handler's class name, for messages.
        metric: the name that was asked for.
        engine: which has fired the event.
        event: the event.

    Returns:
        None where there is nothing to judge: in what a rollout tells, such as returns before an episode has ended, and
        in a validation of a run with rollouts, where the metric is none of its sets'.

    Raises:
        MetricNotFoundError: a validation lacks the metric; it names those that exist.
    """
    metrics = event.payload.metrics
    try:
        return canonical(metric, metrics, place=place)
    except MetricNotFoundError:
        validated = event.type == Events.VALIDATION_COMPLETED.value
        if validated and (_is_of(metric, metrics) or not (engine.state.rollout_round or _fires_rollouts(engine))):
            raise
        return None


def require_validation(place: str, metric: str, engine: Any) -> None:
    """Refuse a trainer that never measures such a metric: one that never validates, unless its rollouts may tell it.

    Raises:
        ConfigurationError: it has no validation set.
    """
    if getattr(engine, "val_loaders", True):  # what is no trainer may validate by itself
        return
    has_rollouts = _fires_rollouts(engine)
    if has_rollouts and not _is_of(metric, ("val/",)):
        return
    remedy = "; name a metric of its rollouts, such as 'rollout/return'" if has_rollouts else ""
    raise ConfigurationError(
        f"{place}(metric={metric!r}): waits for a validation, and the Trainer has no val_loader{remedy}"
    )


def tell_of_silence(place: str, metric: str, engine: Any) -> None:
    """At the end of a run with rollouts, which may lack a metric now and then, say that all of them have."""
    if not engine.state.rollout_round:
        return
    try:
        canonical(metric, engine.state.metrics, place=place)
    except MetricNotFoundError as error:
        get_logger("handlers").warning(f"{place} has judged nothing", engine=engine.name, reason=str(error))


def _fires_rollouts(engine: Any) -> bool:
    return bool(getattr(getattr(engine, "train_loader", None), "fires_rollouts", False))


def _is_of(metric: str, names: Iterable[str]) -> bool:
    """Whether the metric, in full or in its underscore form, is named after the same set as one of the others."""
    flat = metric.replace("/", "_")
    return any(flat.startswith(f"{name.partition('/')[0]}_") for name in names)
