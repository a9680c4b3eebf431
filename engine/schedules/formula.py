"""What a schedule is, what all formulas share, and composing them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeGuard, runtime_checkable

from pulsetrain.engine.errors import CheckpointError, ConfigurationError, unknown_name

__all__ = ["Schedule", "Formula", "Sequential", "Scaled", "is_whole", "require_same"]


@runtime_checkable
class Schedule(Protocol):
    """What a learning rate follows: the same step gives the same rate, whatever was asked before.

    `step` counts the updates already made, so the first update runs at `get_lr(0)`, as in torch and optax. The state
    is the type and the parameters: loading another one is an error, for a run cannot go on exactly under it.
    """

    def get_lr(self, step: int) -> float: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


# What a whole number counts, and how to come by a good one.
_WHOLE = {
    "total_steps": "optimizer update; pass max_epochs * updates per epoch",
    "warmup_steps": "optimizer update; leave the warm-up out to start at the target",
    "decay_steps": "optimizer update; pass how many of total_steps the decay takes",
    "step_size": "optimizer update between two drops",
    "first_cycle": "optimizer update; pass the length of the first cycle",
    "multiplier": "as a whole factor; 1 keeps all cycles equally long",
    "timescale": "optimizer update; pass how many it takes until the rate is divided by the root of 2",
}


@dataclass(frozen=True)
class Formula:
    """What every schedule here shares: the checks of its parameters, its state, and composing."""

    @property
    def length(self) -> int | None:
        """Updates until the schedule is over, which is where `>>` hands over; None where it has no end."""
        return getattr(self, "total_steps", None) or getattr(self, "warmup_steps", None)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            place, given = type(self).__name__, {field.name: value}
            if field.type == "int":  # annotations are text here: `from __future__ import annotations`
                if not is_whole(value):
                    raise ConfigurationError("needs a whole number", place, **given)
                least = 0 if field.default == 0 else 1  # a default of 0 stands for: none of it
                if value < least:
                    raise ConfigurationError(f"needs at least {least} {_WHOLE[field.name]}", place, **given)
            elif field.type == "float":
                if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
                    raise ConfigurationError("needs a finite number that is not negative", place, **given)
                object.__setattr__(self, field.name, float(value))
        lowest, highest = getattr(self, "min_lr", 0.0), getattr(self, "initial_lr", math.inf)
        if lowest > highest:
            raise ConfigurationError("is above {initial_lr}", type(self).__name__, min_lr=lowest, initial_lr=highest)

    def get_lr(self, step: int) -> float:
        raise NotImplementedError

    def __rshift__(self, then: Schedule) -> Sequential:
        """This schedule for its length, then the other one, which starts counting at 0."""
        if not isinstance(then, Schedule):
            return NotImplemented
        return Sequential(*_parts(self), *_parts(then))

    def after(self, first: Schedule) -> Sequential:
        """The other schedule for its length, then this one: `cosine.after(warmup)` is `warmup >> cosine`."""
        return Sequential(*_parts(first), *_parts(self))

    def state_dict(self) -> dict[str, Any]:
        return {"type": type(self).__name__, **{field.name: getattr(self, field.name) for field in fields(self)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes nothing from the state, for there is nothing to take, but checks that it is this schedule's.

        Raises:
            CheckpointError: it is not; names both sides of every difference.
        """
        require_same(type(self).__name__, state, self.state_dict())

    def _require_choice(self, argument: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, argument)
        if value not in choices:
            raise unknown_name(type(self).__name__, argument, value, choices)


def require_same(name: str, saved: Any, own: Mapping[str, Any]) -> None:
    """Refuse a state that differs anywhere from one's own, naming both sides of every difference.

    Raises:
        CheckpointError: it does, or it is no state at all.
    """
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{name}.load_state_dict(state={saved!r}): needs what state_dict() returned")
    theirs, mine = _leaves(saved, ""), _leaves(own, "")
    differences = [
        f"{where} is {theirs.get(where, 'nothing')!r} in the state and {mine.get(where, 'nothing')!r} here"
        for where in [*mine, *(where for where in theirs if where not in mine)]
        if where not in theirs or where not in mine or theirs[where] != mine[where]
    ]
    if differences:
        raise CheckpointError(
            f"{name}.load_state_dict(): {'; '.join(differences)}; "
            "build the schedule with the parameters it was saved with"
        )


def _leaves(value: Any, path: str) -> dict[str, Any]:
    """The single values inside a state, by their paths: `parts[0].schedule.total_steps`."""
    if isinstance(value, Mapping):
        inner = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        inner = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for where, item in inner for name, leaf in _leaves(item, where).items()}


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _parts(schedule: Schedule) -> tuple[tuple[Schedule, int | None], ...]:
    """The parts with their lengths; a composed schedule is taken apart, so that `>>` is associative."""
    if isinstance(schedule, Sequential):
        return schedule.parts
    return ((schedule, getattr(schedule, "length", None)),)


@dataclass(frozen=True, init=False, repr=False)
class Sequential(Formula):
    """Schedules one after another, each counting from 0: `Sequential((Constant(0.1), 100), (Linear(0.1, 900), None))`.

    The last one stays for good, so its length may be None.

    Args:
        parts: pairs of a schedule and how many updates it is in charge.

    Raises:
        ConfigurationError: no parts, a part that is no schedule, or a part before the last without a length.
    """

    parts: tuple[tuple[Schedule, int | None], ...]

    def __init__(self, *parts: tuple[Schedule, int | None]) -> None:
        if not parts:
            raise ConfigurationError("Sequential(): needs at least 1 part, each a pair (schedule, length)")
        for index, part in enumerate(parts):
            if not isinstance(part, (tuple, list)) or len(part) != 2 or not isinstance(part[0], Schedule):
                raise ConfigurationError(f"Sequential(part {index}={part!r}): needs a pair (schedule, length)")
            schedule, length = part
            endless_last = length is None and index == len(parts) - 1
            if not endless_last and (not is_whole(length) or length < 1):
                raise ConfigurationError(
                    f"Sequential(part {index}=({schedule!r}, {length!r})): needs the length in updates, at least 1, "
                    "for only the last schedule may go on without an end; pass Sequential((schedule, length), ...)"
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

    def state_dict(self) -> dict[str, Any]:
        parts = [{"schedule": schedule.state_dict(), "length": length} for schedule, length in self.parts]
        return {"type": "Sequential", "parts": parts}


@dataclass(frozen=True)
class Scaled(Formula):
    """`factor * schedule.get_lr(step)`, for as long as that schedule goes.

    Raises:
        ConfigurationError: what is given is no schedule, or the factor no finite number from 0 on.
    """

    schedule: Schedule
    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.schedule, Schedule):
            raise ConfigurationError(
                "needs a schedule, as Scaled(Cosine(0.1, 1000), 0.5)", "Scaled", schedule=self.schedule
            )

    @property
    def length(self) -> int | None:
        return getattr(self.schedule, "length", None)

    def get_lr(self, step: int) -> float:
        return self.factor * self.schedule.get_lr(step)

    def state_dict(self) -> dict[str, Any]:
        return {"type": "Scaled", "schedule": self.schedule.state_dict(), "factor": self.factor}
