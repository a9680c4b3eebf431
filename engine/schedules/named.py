"""Makes schedules by name and fits them to the length of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, Literal

from pulsetrain.engine.argument_checks import check_choice, check_positive, is_number, is_whole
from pulsetrain.engine.errors import ConfigurationError, did_you_mean
from pulsetrain.engine.schedules import decay
from pulsetrain.engine.schedules.formula import Formula, Schedule
from pulsetrain.engine.schedules.warmup import WSD, OneCycle, Warmup

__all__ = ["NAMES", "build_schedule", "keywords_of"]

# The first parameter of each class is its rate.
_NAMED: dict[str, type[Formula]] = {
    "constant": decay.Constant,
    "linear": decay.Linear,
    "polynomial": decay.Polynomial,
    "cosine": decay.Cosine,
    "cosine_with_restarts": decay.CosineRestarts,
    "step": decay.Step,
    "multi_step": decay.MultiStep,
    "exponential": decay.Exponential,
    "inverse_sqrt": decay.InverseSqrt,
    "wsd": WSD,
    "one_cycle": OneCycle,
}
NAMES = tuple(_NAMED)

# Describes each parameter without a default, for the error when it is missing.
_NEEDED = {
    "step_size": ", the updates between two drops of the rate",
    "milestones": ", the numbers of updates after which the rate drops",
    "gamma": ", the factor of the rate from one update to the next",
}


def build_schedule(
    name: str,
    learning_rate: float,
    *,
    total_steps: int | None,
    warmup_steps: int = 0,
    warmup_strategy: Literal["linear", "exponential"] = "linear",
    min_lr_ratio: float | None = None,
    place: str = "build_schedule",
    **kwargs: Any,
) -> Schedule:
    """The schedule with a name, after an optional warm-up.

    The decay spans the updates that the warm-up leaves of total_steps. Defaults: `first_cycle` (cosine_with_restarts)
    is half of these, rounded up; `decay_steps` (wsd) is a tenth of total_steps; `timescale` (inverse_sqrt) is
    warmup_steps, or 10000 without a warm-up. `milestones` (multi_step) count from the start of the run, including the
    warm-up, and have to come after it.

    >>> schedule = build_schedule("cosine", 0.1, total_steps=100, warmup_steps=10)
    >>> [round(schedule.get_lr(step), 4) for step in (0, 5, 10, 55, 100)]
    [0.0, 0.05, 0.1, 0.055, 0.01]

    Args:
        learning_rate: the highest rate, used by the first update after the warm-up.
        total_steps: updates in the whole run, including the warm-up; None if unknown.
        min_lr_ratio: the lowest rate as a fraction of learning_rate, instead of `min_lr`; by default 0 for linear and
            0.1 for cosine, cosine_with_restarts, polynomial and wsd. The others have no lowest rate.
        place: the start of error messages.
        kwargs: other parameters of the schedule's class: `min_lr` (absolute), `gamma`, `power`, `first_cycle` ...

    Raises:
        ConfigurationError: a name or keyword is unknown, a value is out of range, a parameter without a default is
            missing, total_steps is missing but needed, the warm-up leaves nothing of it, or a milestone is not after
            the warm-up.
    """
    choices = keywords_of(place, name)
    kind = _NAMED[name]
    for key, value in kwargs.items():
        if key not in choices:
            takes = f"it takes {', '.join(choices)}" if choices else "it takes no further keyword"
            rule = f"unknown to the schedule {name!r}; {takes}{did_you_mean(key, choices)}"
            raise ConfigurationError(rule, place, **{key: value})
    _check(place, learning_rate, total_steps, warmup_steps, warmup_strategy)
    _check_floor(place, name, min_lr_ratio, choices, kwargs)
    if warmup_steps and kind is OneCycle:
        raise ConfigurationError(
            "'one_cycle' includes a warm-up; pass its share of the run as pct_start, and warmup_steps=0",
            place,
            warmup_steps=warmup_steps,
        )
    parameters = {fields(kind)[0].name: learning_rate, **kwargs}
    parameters.update(_spans(place, name, total_steps, warmup_steps, parameters))
    if "min_lr" in choices and "min_lr" not in kwargs:
        default = 0.0 if kind is decay.Linear else 0.1
        parameters["min_lr"] = learning_rate * (default if min_lr_ratio is None else min_lr_ratio)
    for field in fields(kind):
        if field.name not in parameters and field.default is MISSING:
            rule = f"needs {{{field.name}}}" + _NEEDED.get(field.name, "")
            raise ConfigurationError(rule, place, name=name, **{field.name: ...})
    decay_steps = parameters.get("decay_steps")
    if total_steps is not None and is_whole(decay_steps) and decay_steps > total_steps - warmup_steps:
        rule = f"is more than the {total_steps - warmup_steps} updates that {{warmup_steps}} leaves"
        raise ConfigurationError(rule, place, decay_steps=decay_steps, warmup_steps=warmup_steps)
    schedule: Schedule = kind(**parameters)
    if not warmup_steps:
        return schedule
    if isinstance(schedule, decay.MultiStep):
        if schedule.milestones[0] <= warmup_steps:
            rule = "counts from the start of the run, and is not after {warmup_steps}; leave out what is in the warm-up"
            raise ConfigurationError(rule, place, milestones=kwargs["milestones"], warmup_steps=warmup_steps)
        schedule = replace(schedule, milestones=tuple(each - warmup_steps for each in schedule.milestones))
    return Warmup(learning_rate, warmup_steps, warmup_strategy) >> schedule


def keywords_of(place: str, name: str) -> tuple[str, ...]:
    """The keywords of a named schedule, without its rate and the lengths that follow from the run.

    >>> keywords_of("build_schedule", "wsd")
    ('decay_steps', 'min_lr', 'decay')

    Raises:
        ConfigurationError: no schedule has that name.
    """
    check_choice(place, "name", name, _NAMED)
    names = [field.name for field in fields(_NAMED[name])[1:]]
    return tuple(name for name in names if name not in ("total_steps", "warmup_steps"))


def _spans(
    place: str, name: str, total_steps: int | None, warmup_steps: int, given: Mapping[str, object]
) -> dict[str, int]:
    """The parameters that follow from the length of the run, unless the caller gave them."""
    names = {field.name for field in fields(_NAMED[name])} - given.keys()
    spans = {"timescale": warmup_steps or 10_000} if "timescale" in names else {}
    if not names & {"total_steps", "first_cycle"}:
        return spans
    if total_steps is None:
        raise ConfigurationError(
            "needs the number of updates ({total_steps}); bound the run (max_updates, or max_epochs over a loader with "
            "a length), or choose 'constant', 'step' or 'inverse_sqrt'",
            place,
            name=name,
            total_steps=None,
        )
    left = total_steps - warmup_steps
    if "first_cycle" in names:
        spans["first_cycle"] = (left + 1) // 2  # rounded down, the last update of an odd run would be a restart
    if "total_steps" in names:
        spans["total_steps"] = left
    if "decay_steps" in names:
        spans["decay_steps"] = max(1, min(total_steps // 10, left))
    return spans


def _check(place: str, learning_rate: object, total_steps: object, warmup_steps: object, strategy: object) -> None:
    check_positive(place, "learning_rate", learning_rate)
    if total_steps is not None and not is_whole(total_steps):
        raise ConfigurationError("needs a whole number of updates, or None if unknown", place, total_steps=total_steps)
    if not is_whole(warmup_steps) or warmup_steps < 0:
        raise ConfigurationError("needs a whole number, 0 for no warm-up", place, warmup_steps=warmup_steps)
    check_choice(place, "warmup_strategy", strategy, ("linear", "exponential"))
    if total_steps is not None and warmup_steps >= total_steps:
        raise ConfigurationError(
            "leaves nothing of {total_steps}; pass a shorter warm-up or a longer run",
            place,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
        )


def _check_floor(
    place: str, name: str, min_lr_ratio: object, choices: tuple[str, ...], kwargs: Mapping[str, object]
) -> None:
    if min_lr_ratio is None:
        return
    if not is_number(min_lr_ratio) or not 0 <= min_lr_ratio <= 1:
        raise ConfigurationError("needs a fraction of learning_rate, from 0 to 1", place, min_lr_ratio=min_lr_ratio)
    if "min_lr" not in choices:
        remedy = "pass final_div_factor" if "final_div_factor" in choices else "leave it out"
        raise ConfigurationError(
            f"the schedule {name!r} has no lowest rate; {remedy}", place, min_lr_ratio=min_lr_ratio
        )
    if "min_lr" in kwargs:
        raise ConfigurationError(
            "{min_lr} sets the lowest rate too; pass one of them",
            place,
            min_lr_ratio=min_lr_ratio,
            min_lr=kwargs["min_lr"],
        )
