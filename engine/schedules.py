"""Learning-rate schedules: pure functions of the number of updates already made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, runtime_checkable

from engine.errors import CheckpointError, ConfigurationError, unknown_name

__all__ = [
    "Schedule",
    "Constant",
    "Linear",
    "Step",
    "Cosine",
    "CosineRestarts",
    "Warmup",
    "Sequential",
    "build_schedule",
]


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
    "step_size": "optimizer update between two drops",
    "first_cycle": "optimizer update; pass the length of the first cycle",
    "multiplier": "as a whole factor; 1 keeps all cycles equally long",
}


@dataclass(frozen=True)
class _Formula:
    """What every schedule here shares: the checks of its parameters, its state, and composing."""

    @property
    def length(self) -> int | None:
        """Updates until the schedule is over, which is where `>>` hands over; None where it has no end."""
        return getattr(self, "total_steps", None) or getattr(self, "warmup_steps", None)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            place = f"{type(self).__name__}({field.name}={value!r})"
            if field.type == "int":  # annotations are text here: `from __future__ import annotations`
                if not isinstance(value, int) or isinstance(value, bool):
                    raise ConfigurationError(f"{place}: needs a whole number")
                if value < 1:
                    raise ConfigurationError(f"{place}: needs at least 1 {_WHOLE[field.name]}")
            elif field.type == "float":
                if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
                    raise ConfigurationError(f"{place}: needs a finite number that is not negative")
                object.__setattr__(self, field.name, float(value))
        lowest, highest = getattr(self, "min_lr", 0.0), getattr(self, "initial_lr", math.inf)
        if lowest > highest:
            raise ConfigurationError(f"{type(self).__name__}(min_lr={lowest!r}): is above initial_lr={highest!r}")

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
        place = f"{type(self).__name__}.load_state_dict"
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{place}(state={state!r}): needs what state_dict() returned")
        saved, own = _leaves(state, ""), _leaves(self.state_dict(), "")
        differences = [
            f"{name} is {saved.get(name, 'nothing')!r} in the state and {own.get(name, 'nothing')!r} here"
            for name in [*own, *(name for name in saved if name not in own)]
            if name not in saved or name not in own or saved[name] != own[name]
        ]
        if differences:
            raise CheckpointError(
                f"{place}(): {'; '.join(differences)}; build the schedule with the parameters it was saved with"
            )


def _parts(schedule: Schedule) -> tuple[tuple[Schedule, int | None], ...]:
    """The parts with their lengths; a composed schedule is taken apart, so that `>>` is associative."""
    if isinstance(schedule, Sequential):
        return schedule.parts
    return ((schedule, getattr(schedule, "length", None)),)


def _leaves(value: Any, path: str) -> dict[str, Any]:
    """The single values inside a state, by their paths: `parts[0].schedule.total_steps`."""
    if isinstance(value, Mapping):
        inner = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        inner = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for where, item in inner for name, leaf in _leaves(item, where).items()}


@dataclass(frozen=True)
class Constant(_Formula):
    """The same rate for ever."""

    initial_lr: float

    def get_lr(self, step: int) -> float:
        return self.initial_lr


@dataclass(frozen=True)
class Linear(_Formula):
    """`min_lr + (initial_lr - min_lr) * (1 - step / total_steps)`, and min_lr after total_steps."""

    initial_lr: float
    total_steps: int
    min_lr: float = 0.0

    def get_lr(self, step: int) -> float:
        if step >= self.total_steps:
            return self.min_lr
        return self.min_lr + (self.initial_lr - self.min_lr) * (1 - step / self.total_steps)


@dataclass(frozen=True)
class Step(_Formula):
    """`initial_lr * gamma ** (step // step_size)`."""

    initial_lr: float
    step_size: int
    gamma: float = 0.1

    def get_lr(self, step: int) -> float:
        return self.initial_lr * self.gamma ** (step // self.step_size)


@dataclass(frozen=True)
class Cosine(_Formula):
    """`min_lr + (initial_lr - min_lr) * (1 + cos(pi * step / total_steps)) / 2`, and min_lr after total_steps.

    Source: Loshchilov and Hutter 2017 (SGDR), eq. 5, without restarts.
    """

    initial_lr: float
    total_steps: int
    min_lr: float = 0.0

    def get_lr(self, step: int) -> float:
        if step >= self.total_steps:
            return self.min_lr
        return self.min_lr + (self.initial_lr - self.min_lr) * (1 + math.cos(math.pi * step / self.total_steps)) / 2


@dataclass(frozen=True)
class CosineRestarts(_Formula):
    """A cosine from initial_lr towards min_lr in each cycle; cycle i is `first_cycle * multiplier ** i` updates long.

    The first update of each cycle runs at initial_lr. Source: Loshchilov and Hutter 2017 (SGDR), eq. 5.
    """

    initial_lr: float
    first_cycle: int
    multiplier: int = 1
    min_lr: float = 0.0

    def get_lr(self, step: int) -> float:
        cycle = self.first_cycle
        if self.multiplier == 1:
            step %= cycle
        else:  # whole numbers, not logarithms: those put a cycle's first update into the cycle before
            while step >= cycle:
                step -= cycle
                cycle *= self.multiplier
        return self.min_lr + (self.initial_lr - self.min_lr) * (1 + math.cos(math.pi * step / cycle)) / 2


@dataclass(frozen=True)
class Warmup(_Formula):
    """From 0 to target_lr, which it keeps after warmup_steps.

    linear: `target_lr * step / warmup_steps`; exponential: `target_lr * (step / warmup_steps) ** 2`. The first update
    runs at rate 0, so that the rate climbs to the target in equal parts; that is torch's and optax's count of steps.
    """

    target_lr: float
    warmup_steps: int
    strategy: Literal["linear", "exponential"] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy not in ("linear", "exponential"):
            raise unknown_name("Warmup", "strategy", self.strategy, ("linear", "exponential"))

    def get_lr(self, step: int) -> float:
        if step >= self.warmup_steps:
            return self.target_lr
        done = step / self.warmup_steps
        return self.target_lr * (done if self.strategy == "linear" else done * done)


@dataclass(frozen=True, init=False, repr=False)
class Sequential(_Formula):
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
            if not endless_last and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
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


# name: its class, the parameter that spans the run, and what the caller may choose besides
_NAMED: dict[str, tuple[type[_Formula], str | None, tuple[str, ...]]] = {
    "constant": (Constant, None, ()),
    "linear": (Linear, "total_steps", ("min_lr",)),
    "cosine": (Cosine, "total_steps", ("min_lr",)),
    "cosine_with_restarts": (CosineRestarts, "first_cycle", ("first_cycle", "multiplier", "min_lr")),
    "step": (Step, None, ("step_size", "gamma")),
}


def build_schedule(
    name: str,
    learning_rate: float,
    *,
    total_steps: int | None,
    warmup_steps: int = 0,
    warmup_strategy: Literal["linear", "exponential"] = "linear",
    min_lr_ratio: float = 0.1,
    **kwargs: Any,
) -> Schedule:
    """The schedule of that name, after a warm-up where one is asked for.

    linear, cosine and cosine_with_restarts fall to `learning_rate * min_lr_ratio` (or `min_lr`) over what the warm-up
    leaves of total_steps; cosine_with_restarts does so in one cycle unless `first_cycle` is given.

    Args:
        learning_rate: the highest rate: that of the first update after the warm-up.
        total_steps: updates of the whole run, the warm-up's among them; None where nobody knows.
        kwargs: `min_lr`; `first_cycle` and `multiplier` (cosine_with_restarts); `step_size` and `gamma` (step).

    Raises:
        ConfigurationError: an unknown name or keyword, a value out of range, no total_steps where they are needed, or
            none left by the warm-up.
    """
    place = "build_schedule"
    if name not in _NAMED:
        raise unknown_name(place, "name", name, _NAMED)
    kind, span, choices = _NAMED[name]
    for key, value in kwargs.items():
        if key not in choices:
            takes = f"it takes {', '.join(choices)}" if choices else "it takes no further keyword"
            raise ConfigurationError(f"{place}({key}={value!r}): unknown to the schedule {name!r}; {takes}")
    if not isinstance(learning_rate, (int, float)) or not 0 < learning_rate < math.inf:
        raise ConfigurationError(f"{place}(learning_rate={learning_rate!r}): needs a positive number")
    if not isinstance(min_lr_ratio, (int, float)) or not 0 <= min_lr_ratio <= 1:
        raise ConfigurationError(f"{place}(min_lr_ratio={min_lr_ratio!r}): needs a part of learning_rate, from 0 to 1")
    if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool) or warmup_steps < 0:
        raise ConfigurationError(f"{place}(warmup_steps={warmup_steps!r}): needs a whole number, 0 for no warm-up")
    if total_steps is not None and warmup_steps >= total_steps:
        raise ConfigurationError(
            f"{place}(warmup_steps={warmup_steps}): leaves nothing of total_steps={total_steps}; "
            "pass a shorter warm-up or a longer run"
        )
    parameters: dict[str, Any] = {"initial_lr": learning_rate, **kwargs}
    if span is not None and span not in parameters:
        if total_steps is None:
            raise ConfigurationError(
                f"{place}(total_steps=None): the schedule {name!r} falls over a known number of updates; bound the run "
                "(max_updates, or max_epochs over a loader with a length) or choose 'constant' or 'step'"
            )
        parameters[span] = total_steps - warmup_steps
    if "min_lr" in choices:
        parameters.setdefault("min_lr", learning_rate * min_lr_ratio)
    if kind is Step and "step_size" not in parameters:
        raise ConfigurationError(f"{place}(name='step'): needs step_size, the updates between two drops of the rate")
    schedule = kind(**parameters)
    return schedule.after(Warmup(learning_rate, warmup_steps, warmup_strategy)) if warmup_steps else schedule
