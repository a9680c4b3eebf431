"""Schedules given by one formula from the first update to the last."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from pulsetrain.engine.argument_checks import is_whole
from pulsetrain.engine.errors import refused
from pulsetrain.engine.schedules.formula import Formula

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
    """The same rate at every update.

    >>> Constant(0.1).get_lr(1000)
    0.1
    """

    initial_lr: float

    def get_lr(self, step: int) -> float:
        return self.initial_lr


@dataclass(frozen=True)
class Linear(Formula):
    """`min_lr + (initial_lr - min_lr) * (1 - step / total_steps)`, and min_lr after total_steps.

    >>> schedule = Linear(1.0, total_steps=4)
    >>> [schedule.get_lr(step) for step in (0, 1, 2, 4, 9)]
    [1.0, 0.75, 0.5, 0.0, 0.0]
    """

    initial_lr: float
    total_steps: int
    min_lr: float = 0.0

    def get_lr(self, step: int) -> float:
        if step >= self.total_steps:
            return self.min_lr
        return self.min_lr + (self.initial_lr - self.min_lr) * (1 - step / self.total_steps)


@dataclass(frozen=True)
class Polynomial(Formula):
    """`min_lr + (initial_lr - min_lr) * (1 - step / total_steps) ** power`, and min_lr after total_steps.

    >>> schedule = Polynomial(1.0, total_steps=4, power=2.0)
    >>> [schedule.get_lr(step) for step in (0, 2, 4)]
    [1.0, 0.25, 0.0]
    """

    initial_lr: float
    total_steps: int
    power: float = 1.0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.power == 0:
            raise refused(self, "never falls; pass a positive power, or choose Constant", "power")

    def get_lr(self, step: int) -> float:
        if step >= self.total_steps:
            return self.min_lr
        left: float = (1 - step / self.total_steps) ** self.power
        return self.min_lr + (self.initial_lr - self.min_lr) * left


@dataclass(frozen=True)
class Step(Formula):
    """`initial_lr * gamma ** (step // step_size)`; math.inf if a gamma above 1 overflows.

    >>> schedule = Step(1.0, step_size=10, gamma=0.5)
    >>> [schedule.get_lr(step) for step in (0, 9, 10, 20)]
    [1.0, 1.0, 0.5, 0.25]
    """

    initial_lr: float
    step_size: int
    gamma: float = 0.1

    def get_lr(self, step: int) -> float:
        return _geometric(self.initial_lr, self.gamma, step // self.step_size)


@dataclass(frozen=True)
class MultiStep(Formula):
    """`initial_lr * gamma ** n` from the n-th milestone on: the rate drops after `milestones[0]` updates, and so on.

    It is math.inf if a gamma above 1 overflows.

    >>> schedule = MultiStep(1.0, milestones=(3, 6), gamma=0.5)
    >>> [schedule.get_lr(step) for step in (2, 3, 5, 6)]
    [1.0, 0.5, 0.5, 0.25]

    Args:
        milestones: numbers of updates, in ascending order.

    Raises:
        ConfigurationError: there are no milestones, or they are not ascending whole numbers of at least 1.
    """

    initial_lr: float
    milestones: tuple[int, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.milestones
        if not isinstance(given, (tuple, list)) or not given:
            raise refused(self, "needs a tuple of updates, such as (3000, 6000)", "milestones")
        if not all(is_whole(item) and item >= 1 for item in given):
            raise refused(self, "needs whole numbers, each at least 1", "milestones")
        if any(later <= earlier for earlier, later in pairwise(given)):
            raise refused(self, "needs ascending milestones; sort them and remove duplicates", "milestones")
        object.__setattr__(self, "milestones", tuple(given))  # configuration files give a list

    def get_lr(self, step: int) -> float:
        return _geometric(self.initial_lr, self.gamma, bisect_right(self.milestones, step))


@dataclass(frozen=True)
class Exponential(Formula):
    """`initial_lr * gamma ** step`; math.inf if a gamma above 1 overflows.

    >>> schedule = Exponential(1.0, gamma=0.5)
    >>> [schedule.get_lr(step) for step in (0, 1, 3)]
    [1.0, 0.5, 0.125]
    """

    initial_lr: float
    gamma: float

    def get_lr(self, step: int) -> float:
        return _geometric(self.initial_lr, self.gamma, step)


@dataclass(frozen=True)
class Cosine(Formula):
    """`min_lr + (initial_lr - min_lr) * (1 + cos(pi * step / total_steps)) / 2`, and min_lr after total_steps.

    Source: Loshchilov and Hutter 2017 (SGDR), eq. 5, without restarts.

    >>> schedule = Cosine(1.0, total_steps=4)
    >>> [round(schedule.get_lr(step), 3) for step in (0, 1, 2, 3, 4)]
    [1.0, 0.854, 0.5, 0.146, 0.0]
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
    """A cosine from initial_lr towards min_lr in each cycle; cycle i has `first_cycle * multiplier ** i` updates.

    The first update of each cycle uses initial_lr. Source: Loshchilov and Hutter 2017 (SGDR), eq. 5.

    >>> schedule = CosineRestarts(1.0, first_cycle=2, multiplier=2)
    >>> [round(schedule.get_lr(step), 3) for step in range(7)]
    [1.0, 0.5, 1.0, 0.854, 0.5, 0.146, 1.0]
    """

    initial_lr: float
    first_cycle: int
    multiplier: int = 1
    min_lr: float = 0.0

    def get_lr(self, step: int) -> float:
        cycle = self.first_cycle
        if self.multiplier == 1:
            step %= cycle
        else:  # integers, not logarithms: rounding would put a cycle's first update into the cycle before
            while step >= cycle:
                step -= cycle
                cycle *= self.multiplier
        return self.min_lr + (self.initial_lr - self.min_lr) * (1 + math.cos(math.pi * step / cycle)) / 2


@dataclass(frozen=True)
class InverseSqrt(Formula):
    """`initial_lr * sqrt(timescale / (step + timescale))`, without an end.

    With `timescale` equal to the warm-up's steps, `Warmup(...) >> InverseSqrt(...)` is the schedule of Vaswani et al.
    2017, eq. 3.

    >>> schedule = InverseSqrt(1.0, timescale=100)
    >>> schedule.get_lr(0), schedule.get_lr(300)
    (1.0, 0.5)
    """

    initial_lr: float
    timescale: int

    def get_lr(self, step: int) -> float:
        return self.initial_lr * math.sqrt(self.timescale / (step + self.timescale))


def _geometric(initial_lr: float, gamma: float, times: int) -> float:
    try:
        return initial_lr * gamma**times
    except OverflowError:  # a power raises it; a product silently becomes infinite
        return math.inf if initial_lr else 0.0
