"""Whether a metric's value is the best so far, for every handler that stops, keeps or saves by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from pulsetrain.engine import ConfigurationError, Engine, Event, Events, MetricNotFoundError, Phase, is_training_run
from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.metrics import Mode, canonical, required_mode
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.engine_queries import attribute
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS

__all__ = [
    "Judge",
    "check_judged",
    "check_mode",
    "decide_mode",
    "is_better",
    "judged_name",
    "subscribe_judge",
    "warn_if_never_reported",
]

_OF_ROLLOUTS = ("rollout", "policy")  # a strategy or a handler may fire their events


class Judge(Protocol):
    """What ranks the values of a metric."""

    metric: str
    mode: Mode | None


def is_better(value: float, best: float | None, mode: Mode, min_delta: float = 0.0) -> bool:
    """Whether the value is an improvement; NaN never is.

    Args:
        value: the metric's new value.
        best: the best so far; None if there is none, so that any number is an improvement.
        mode: whether smaller ("min") or larger ("max") is better.
        min_delta: an improvement must be larger than this.

    >>> is_better(0.5, 0.7, "min"), is_better(0.5, 0.7, "min", min_delta=0.5), is_better(math.nan, None, "max")
    (True, False, False)
    """
    if math.isnan(value):
        return False
    if best is None:
        return True
    gain = best - value if mode == "min" else value - best
    return gain > min_delta


def check_judged(place: str, metric: object, mode: object) -> None:
    """Check the arguments `metric` and `mode` of a handler.

    Args:
        place: the handler's class name, for messages.
        metric: must be a name.
        mode: must be "min", "max" or None, to be inferred.

    Raises:
        ConfigurationError: one of them cannot be used.
    """
    if not isinstance(metric, str) or not metric:
        raise ConfigurationError("needs a metric's name, such as 'val/loss'", place, metric=metric)
    check_mode(place, mode)


def check_mode(place: str, mode: object) -> None:
    """Check the argument `mode` of a handler, which is "min", "max" or None.

    Raises:
        ConfigurationError: it is none of them.
    """
    if mode is not None:
        check_choice(place, "mode", mode, ("min", "max"))


def decide_mode(place: str, judge: Judge, engine: Engine | None = None) -> Mode:
    """The judge's mode. If none was given, it is inferred the first time, kept, and in a training run logged.

    Args:
        place: the handler's class name, for messages.
        judge: whose `mode` is set.
        engine: a training run knows the metric object, which decides; any other has only the metric's name.

    Raises:
        ConfigurationError: neither the object nor the name says it.
    """
    if judge.mode is None:
        judge.mode = required_mode(place, judge.metric, engine.val_metrics if is_training_run(engine) else None)
        if is_training_run(engine):
            text = "larger values are better" if judge.mode == "max" else "smaller values are better"
            get_logger("handlers").info(text, handler=place, metric=judge.metric)
    return judge.mode


def judged_name(place: str, metric: str, engine: Engine, event: Event) -> str | None:
    """The metric's full name in the payload of one of METRIC_EVENTS.

    Args:
        place: the handler's class name, for messages.
        metric: the name that the user gave.
        engine: fired the event.
        event: one of METRIC_EVENTS.

    Returns:
        None if this event does not report the metric and need not: a rollout may lack returns until an episode has
        ended, and in a run with rollouts a validation may lack a metric that does not belong to its sets.

    Raises:
        MetricNotFoundError: a validation lacks the metric; the message lists those that exist.
    """
    metrics: Mapping[str, float] = event.payload.metrics
    try:
        return canonical(metric, metrics, place=place)
    except MetricNotFoundError:
        is_validation = event.type == Events.VALIDATION_COMPLETED.value
        has_rollouts = engine.state.rollout_round or _fires_rollouts(engine)
        if not is_validation or (has_rollouts and not _is_of(metric, metrics)):
            return None
        raise


def subscribe_judge(
    subscribe: Attachment,
    judge: Callable[[Engine, Event], object],
    place: str,
    metric: str,
    engine: Engine,
    phase: Phase,
) -> None:
    """Subscribe the method that judges to METRIC_EVENTS.

    A trainer that never measures such a metric is rejected: it has no validation set of that name, and no rollouts that
    report it.

    Args:
        subscribe: the handler's.
        judge: the method.
        place: the handler's class name, for messages.
        metric: the name that the user gave.
        engine: the engine being attached to.
        phase: of the method.

    Raises:
        ConfigurationError: the trainer has no validation set.
        MetricNotFoundError: the metric is named after none of its sets.
    """
    val_loaders = attribute(engine, "val_loaders", object)
    validates = val_loaders or val_loaders is None  # an engine without such an attribute may validate in its own way
    has_rollouts = _fires_rollouts(engine)
    if not validates and (not has_rollouts or _is_of(metric, ("val/",))):
        if has_rollouts:
            remedy = "name a metric of its rollouts, such as 'rollout/return'"
        elif metric_of_data := _on_training_data(metric):
            remedy = f"pass val_loader={{'train-eval': train_loader}}, and name '{metric_of_data}'"
        else:
            remedy = "pass val_loader=..., for which the training data will do"
        rule = f"waits for a validation, and the Trainer has no val_loader; {remedy}"
        raise ConfigurationError(rule, place, metric=metric)
    if is_training_run(engine) and engine.val_loaders and not has_rollouts:
        _check_set(place, metric, list(engine.val_loaders))
    for event in METRIC_EVENTS:
        subscribe(event, judge, phase=phase)


def warn_if_never_reported(place: str, metric: str, engine: Engine) -> None:
    """At the end of a run with rollouts, which need not all report the metric, warn if none of them did."""
    if not engine.state.rollout_round:
        return
    try:
        canonical(metric, engine.state.metrics, place=place)
    except MetricNotFoundError as error:
        get_logger("handlers").warning(f"{place} has judged nothing", engine=engine.name, reason=str(error))


def _check_set(place: str, metric: str, sets: Sequence[str]) -> None:
    """Reject a metric that no validation reports: each metric of these is named after a set, as is a logged value."""
    if _is_of(metric, (*sets, *_OF_ROLLOUTS)):
        return
    first = sets[0]
    if metric_of_data := _on_training_data(metric):
        rule = (
            "only metrics of validations are judged; to judge the training data, pass it as another validation set, "
            f"val_loader={{'{first}': ..., 'train-eval': train_loader}}, and name '{metric_of_data}'; or call "
            f"trainer.log('{first}/...', value), and name that"
        )
    else:
        rule = (
            "only metrics of validations are judged, and no validation set has this name; there are: "
            f"{', '.join(sets)}; name a metric such as '{first}/loss'; a value of trainer.log is judged with each "
            f"validation if it is logged as '{first}/...'"
        )
    raise MetricNotFoundError(rule, place, metric=metric)


def _fires_rollouts(engine: Engine) -> bool:
    return bool(getattr(attribute(engine, "train_loader", object), "fires_rollouts", False))


def _on_training_data(metric: str) -> str | None:
    """The name of a metric of training where a validation set 'train-eval' reports it; None for any other metric.

    >>> _on_training_data("train/loss"), _on_training_data("val/loss")
    ('train-eval/loss', None)
    """
    return f"train-eval/{metric[len('train/') :]}" if _is_of(metric, ("train/",)) else None


def _is_of(metric: str, names: Iterable[str]) -> bool:
    """Whether the metric, in full or in its underscore form, is named after the same set as one of the others."""
    flat = metric.replace("/", "_")
    return any(flat.startswith(f"{name.partition('/')[0]}_") for name in names)
