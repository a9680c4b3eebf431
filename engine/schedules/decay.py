"""Schedules of one formula each, from the first update to the last."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.schedules.formula import Formula, is_whole

__all__ = [
    "Constant",
    "Linear",
    "Polynomial",
    "Step",
    "MultiStep",
    "Exponential",
    "Cosine",
    "CosineRestarts",
    "InverseSqrt",
]


@dataclass(frozen=True)
class Constant(Formula):
    """The same rate for ever."""

    initial_lr: float

    def get_lr(self, step: int) -> float:
        return self.initial_lr


@dataclass(frozen=True)
class Linear(Formula):
    """`min_lr + (initial_lr - min_lr) * (1 - step / total_steps)`, and min_lr after total_steps."""

    initial_lr: float
    total_steps: int
    min_lr: float = 0.0

    def get_lr(self, step: int) -> float:
        if step >= self.total_steps:
            return self.min_lr
        return self.min_lr + (self.initial_lr - self.min_lr) * (1 - step / self.total_steps)


@dataclass(frozen=True)
class Polynomial(Formula):
    """`min_lr + (initial_lr - min_lr) * (1 - step / total_steps) ** power`, and min_lr after total_steps."""

    initial_lr: float
    total_steps: int
    power: float = 1.0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.power == 0:
            raise ConfigurationError("never falls; pass a positive power, or choose Constant", "Polynomial", power=0.0)

    def get_lr(self, step: int) -> float:
        if step >= self.total_steps:
            return self.min_lr
        left: float = (1 - step / self.total_steps) ** self.power
        return self.min_lr + (self.initial_lr - self.min_lr) * left


@dataclass(frozen=True)
class Step(Formula):
    """`initial_lr * gamma ** (step // step_size)`; math.inf where a gamma above 1 leaves the range of floats."""

    initial_lr: float
    step_size: int
    gamma: float = 0.1

    def get_lr(self, step: int) -> float:
        return _geometric(self.initial_lr, self.gamma, step // self.step_size)


@dataclass(frozen=True)
class MultiStep(Formula):
    """`initial_lr * gamma ** n` from the n-th milestone on: the update behind `milestones[0]` others is the first drop.

    It is math.inf where a gamma above 1 leaves the range of floats.

    Args:
        milestones: numbers of updates, each above the one before.

    Raises:
        ConfigurationError: no milestones, or they are no whole numbers from 1 on that rise.
    """

    initial_lr: float
    milestones: tuple[int, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        place, given = "MultiStep", self.milestones
        if not isinstance(given, (tuple, list)) or not given:
            raise ConfigurationError("needs a tuple of updates, as (3000, 6000)", place, milestones=given)
        if not all(is_whole(item) and item >= 1 for item in given):
            raise ConfigurationError("needs whole numbers, each at least 1", place, milestones=given)
        if any(later <= earlier for earlier, later in pairwise(given)):
            raise ConfigurationError(
                "needs each milestone above the one before; sort them, each once", place, milestones=given
            )
        object.__setattr__(self, "milestones", tuple(given))  # a list comes from configuration files

    def get_lr(self, step: int) -> float:
        return _geometric(self.initial_lr, self.gamma, bisect_right(self.milestones, step))


@dataclass(frozen=True)
class Exponential(Formula):
    """`initial_lr * gamma ** step`; math.inf where a gamma above 1 leaves the range of floats."""

    initial_lr: float
    gamma: float

    def get_lr(self, step: int) -> float:
        return _geometric(self.initial_lr, self.gamma, step)


@dataclass(frozen=True)
class Cosine(Formula):
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
class CosineRestarts(Formula):
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
class InverseSqrt(Formula):
    """`initial_lr * sqrt(timescale / (step + timescale))`, which has no end: `Warmup(...) >> InverseSqrt(...)`.

    With timescale = warm-up steps it is the decay of Vaswani et al. 2017 (eq. 3), from the warm-up's target on.
    """

    initial_lr: float
    timescale: int

    def get_lr(self, step: int) -> float:
        return self.initial_lr * math.sqrt(self.timescale / (step + self.timescale))


def _geometric(initial_lr: float, gamma: float, times: int) -> float:
    try:
        return initial_lr * gamma**times
    except OverflowError:  # of a power; a product is infinite without a word
        return math.inf if initial_lr else 0.0
