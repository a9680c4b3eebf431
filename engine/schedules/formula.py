"""The schedule protocol, the base class of the formulas, and schedules composed of others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal, Protocol, cast, get_args, get_origin, get_type_hints, runtime_checkable

from torch import Tensor

from pulsetrain.engine.argument_checks import check_choice, is_number, is_whole
from pulsetrain.engine.errors import CheckpointError, ConfigurationError, refused

__all__ = ["Schedule", "Formula", "Sequential", "Scaled", "require_same"]


@runtime_checkable
class Schedule(Protocol):
    """A learning rate as a pure function: the same step always gives the same rate.

    `step` counts the updates already made, so the first update uses `get_lr(0)`, as in torch and optax. The state is
    the type and the parameters. Loading a different state is an error, since a run cannot resume exactly under a
    different schedule.
    """

    def get_lr(self, step: int) -> float:
        """The rate of the update that follows `step` others."""

    def state_dict(self) -> dict[str, object]:
        """The type and the parameters."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Checks that a saved state is this schedule's.

        Raises:
            CheckpointError: it is not.
        """


@cache
def _kinds_of(schedule: type) -> dict[str, object]:
    """The types of the fields; of a class whose annotations cannot be resolved, those that are plain names."""
    try:
        return get_type_hints(schedule)
    except NameError:
        plain = {"int": int, "float": float}
        return {field.name: plain.get(str(field.type), field.type) for field in fields(schedule)}


# The unit of each whole-number parameter, and how to choose it.
_WHOLE = {
    "total_steps": "optimizer update; pass max_epochs * updates per epoch",
    "warmup_steps": "optimizer update; leave the warm-up out to start at the target",
    "decay_steps": "optimizer update; pass how many of total_steps the decay takes",
    "step_size": "optimizer update between two drops",
    "first_cycle": "optimizer update; pass the length of the first cycle",
    "multiplier": "as a whole factor; 1 keeps all cycles equally long",
    "timescale": "optimizer update; pass how many it takes until the rate is divided by the square root of 2",
}


@dataclass(frozen=True)
class Formula:
    """Base class of the schedules: parameter checks, state, and composition with `>>`.

    >>> from pulsetrain.engine.schedules import Constant, Linear, Warmup
    >>> schedule = Warmup(1.0, warmup_steps=2) >> Linear(1.0, total_steps=2)
    >>> [schedule.get_lr(step) for step in range(5)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    >>> Constant(-0.1)
    Traceback (most recent call last):
        ...
    pulsetrain.engine.errors.ConfigurationError: Constant(initial_lr=-0.1): needs a finite number that is not negative
    """

    @property
    def length(self) -> int | None:
        """The number of updates until the schedule ends and `>>` switches to the next; None if it has no end."""
        return getattr(self, "total_steps", None) or getattr(self, "warmup_steps", None)

    def __post_init__(self) -> None:
        kind_of: type = type(self)
        kinds = _kinds_of(kind_of)
        for field in fields(self):
            value, kind = getattr(self, field.name), kinds.get(field.name)
            if kind is int:
                if not is_whole(value):
                    raise refused(self, "needs a whole number", field.name)
                least = 0 if field.default == 0 else 1  # a default of 0 means "none", so 0 is allowed
                if value < least:
                    raise refused(self, f"needs at least {least} {_WHOLE.get(field.name, '')}".rstrip(), field.name)
            elif kind is float:
                if not is_number(value) or value < 0:
                    raise refused(self, "needs a finite number that is not negative", field.name)
                object.__setattr__(self, field.name, float(value))
            elif get_origin(kind) is Literal:
                check_choice(type(self).__name__, field.name, value, get_args(kind))
        if getattr(self, "min_lr", 0.0) > getattr(self, "initial_lr", math.inf):
            raise refused(self, "is above {initial_lr}", "min_lr", "initial_lr")

    def get_lr(self, step: int) -> float:
        """The rate of the update that follows `step` others."""
        raise NotImplementedError

    def __rshift__(self, then: Schedule) -> Sequential:
        """This schedule for its length, then the other one, which counts from 0."""
        if not isinstance(then, Schedule):
            return NotImplemented
        return Sequential(*_parts(self), *_parts(then))

    def after(self, first: Schedule) -> Sequential:
        """The other schedule for its length, then this one: `cosine.after(warmup)` is `warmup >> cosine`."""
        return Sequential(*_parts(first), *_parts(self))

    def state_dict(self) -> dict[str, object]:
        return {"type": type(self).__name__, **{field.name: getattr(self, field.name) for field in fields(self)}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Changes nothing, since a schedule has no progress to restore; checks that the state is this schedule's.

        Raises:
            CheckpointError: the state differs; names both values of every difference.
        """
        require_same(type(self).__name__, state, self.state_dict())


def require_same(name: str, saved: object, own: Mapping[str, object]) -> None:
    """Rejects a saved state that differs from the schedule's own.

    >>> require_same("Linear", {"total_steps": 10}, {"total_steps": 20})
    Traceback (most recent call last):
        ...
    pulsetrain.engine.errors.CheckpointError: Linear.load_state_dict(): ...

    Raises:
        CheckpointError: it differs or is not a mapping; names both values of every difference.
    """
    if not isinstance(saved, Mapping):
        raise CheckpointError("needs what state_dict() returned", f"{name}.load_state_dict", state=saved)
    theirs, mine = _leaves(saved, ""), _leaves(own, "")
    differences = [
        f"{where} is {theirs.get(where, 'nothing')!r} in the state and {mine.get(where, 'nothing')!r} here"
        for where in [*mine, *(where for where in theirs if where not in mine)]
        if where not in theirs or where not in mine or theirs[where] != mine[where]
    ]
    if differences:
        remedy = "build the schedule with the parameters it was saved with"
        if any(each.partition(" ")[0].endswith("total_steps") for each in differences):
            remedy = (
                "the schedule ends with the run, so resume with the run's length (max_epochs, max_iterations, ...); to "
                "train longer, start a new run from its weights; one with a config.yaml also by pulsetrain fork RUN "
                "--at ITERATION --into FOLDER --set training.max_epochs=N"
            )
        raise CheckpointError(f"{name}.load_state_dict(): {'; '.join(differences)}; {remedy}")


def _leaves(value: object, path: str) -> dict[str, object]:
    """The leaf values of a state by their paths, such as `parts[0].schedule.total_steps`."""
    if isinstance(value, Mapping):
        inner = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        inner = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for where, item in inner for name, leaf in _leaves(item, where).items()}


def _parts(schedule: Schedule) -> tuple[tuple[Schedule, int | None], ...]:
    """The parts with their lengths; a composed schedule is flattened, so that `>>` is associative."""
    if isinstance(schedule, Sequential):
        return schedule.parts
    return ((schedule, getattr(schedule, "length", None)),)


@dataclass(frozen=True, init=False, repr=False)
class Sequential(Formula):
    """Schedules one after another, each counting its steps from 0.

    The last one has no end, so its length may be None.

    >>> from pulsetrain.engine.schedules import Constant, Linear
    >>> schedule = Sequential((Constant(1.0), 2), (Linear(1.0, total_steps=4), None))
    >>> [schedule.get_lr(step) for step in range(6)]
    [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]

    Args:
        parts: pairs of a schedule and the number of updates it applies to.

    Raises:
        ConfigurationError: there are no parts, a part is not a schedule, or a part before the last has no length.
    """

    parts: tuple[tuple[Schedule, int | None], ...]

    def __init__(self, *parts: tuple[Schedule, int | None]) -> None:
        if not parts:
            raise ConfigurationError("Sequential(): needs at least 1 part, each a pair (schedule, length)")
        for index, part in enumerate(parts):
            if not isinstance(part, (tuple, list)) or len(part) != 2 or not isinstance(part[0], Schedule):
                raise ConfigurationError("needs a pair (schedule, length)", "Sequential", **{f"parts[{index}]": part})
            length = part[1]
            endless_last = length is None and index == len(parts) - 1
            if not endless_last and (not is_whole(length) or length < 1):
                raise ConfigurationError(
                    "needs the length in updates, at least 1, since only the last schedule may be endless; "
                    "pass Sequential((schedule, length), ...)",
                    "Sequential",
                    **{f"parts[{index}]": part},
                )
        object.__setattr__(self, "parts", tuple((schedule, length) for schedule, length in parts))

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self.parts))})"

    @property
    def length(self) -> int | None:
        lengths = [length for _, length in self.parts if length is not None]
        return sum(lengths) if len(lengths) == len(self.parts) else None

    def get_lr(self, step: int) -> float:
        for schedule, length in self.parts[:-1]:
            if step < length:  # type: ignore[operator]  # only the last length may be None
                return schedule.get_lr(step)
            step -= length  # type: ignore[operator]  # as above
        return self.parts[-1][0].get_lr(step)

    def state_dict(self) -> dict[str, object]:
        parts = [{"schedule": schedule.state_dict(), "length": length} for schedule, length in self.parts]
        return {"type": "Sequential", "parts": parts}


@dataclass(frozen=True)
class Scaled(Formula):
    """`factor * schedule.get_lr(step)`, as long as that schedule.

    A factor that is a tensor of shape () gets a gradient through the updates of `TrainerCore`: a learnt rate.

    >>> from pulsetrain.engine.schedules import Constant
    >>> Scaled(Constant(0.5), factor=4.0).get_lr(0)
    2.0

    Raises:
        ConfigurationError: the argument is not a schedule, or the factor is neither a finite number of at least 0 nor a
            floating-point tensor of shape ().
    """

    schedule: Schedule
    factor: float | Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.schedule, Schedule):
            raise refused(self, "needs a schedule, such as Scaled(Cosine(0.1, 1000), 0.5)", "schedule")
        if isinstance(self.factor, Tensor):
            if self.factor.ndim or not self.factor.is_floating_point():
                raise refused(self, "needs a number, or a floating-point tensor of shape ()", "factor")
        elif not is_number(self.factor) or self.factor < 0:
            raise refused(self, "needs a finite number that is not negative", "factor")
        else:
            object.__setattr__(self, "factor", float(self.factor))

    @property
    def length(self) -> int | None:
        return getattr(self.schedule, "length", None)

    def get_lr(self, step: int) -> float:
        return cast(float, self.factor) * self.schedule.get_lr(step)  # a tensor where the factor is one

    def state_dict(self) -> dict[str, object]:
        return {"type": "Scaled", "schedule": self.schedule.state_dict(), "factor": self.factor}
