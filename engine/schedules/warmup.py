"""Schedules that rise first: warm-up, warm-up with plateau and decay (WSD), and one-cycle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pulsetrain.engine.errors import refused
from pulsetrain.engine.schedules.formula import Formula

__all__ = ["Warmup", "WSD", "OneCycle"]

_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "sqrt": lambda done: 1 - math.sqrt(done),
}


@dataclass(frozen=True)
class Warmup(Formula):
    """Rises from 0 to target_lr over warmup_steps, and stays there.

    linear: `target_lr * step / warmup_steps`; exponential: `target_lr * (step / warmup_steps) ** 2`. The first update
    has rate 0, so the rate rises in equal parts, as in torch and optax.

    >>> schedule = Warmup(1.0, warmup_steps=4)
    >>> [schedule.get_lr(step) for step in (0, 2, 4, 9)]
    [0.0, 0.5, 1.0, 1.0]
    """

    target_lr: float
    warmup_steps: int
    strategy: Literal["linear", "exponential"] = "linear"

    def get_lr(self, step: int) -> float:
        if step >= self.warmup_steps:
            return self.target_lr
        done = step / self.warmup_steps
        return self.target_lr * (done if self.strategy == "linear" else done * done)


@dataclass(frozen=True)
class WSD(Formula):
    """Warm-up, stable, decay (Hu et al. 2024, MiniCPM): initial_lr between a linear rise and a late decay.

    The rate is `min_lr + (initial_lr - min_lr) * share`. Over warmup_steps the share is `step / warmup_steps`. Over the
    last decay_steps of total_steps, with t from 0 to 1, it is `1 - t` (linear), `(1 + cos(pi * t)) / 2` (cosine) or
    `1 - sqrt(t)` (sqrt). After total_steps the rate is min_lr.

    >>> schedule = WSD(1.0, total_steps=10, decay_steps=4, warmup_steps=2)
    >>> [schedule.get_lr(step) for step in (0, 1, 2, 6, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]

    Raises:
        ConfigurationError: a value is out of range, or the warm-up and the decay together exceed total_steps.
    """

    initial_lr: float
    total_steps: int
    decay_steps: int
    warmup_steps: int = 0
    min_lr: float = 0.0
    decay: Literal["linear", "cosine", "sqrt"] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps + self.decay_steps > self.total_steps:
            rule = "is more than {warmup_steps} leaves of {total_steps}; shorten the decay or the warm-up"
            raise refused(self, rule, "decay_steps", "warmup_steps", "total_steps")

    def get_lr(self, step: int) -> float:
        if step >= self.total_steps:
            return self.min_lr
        into_decay = step - (self.total_steps - self.decay_steps)
        if step < self.warmup_steps:
            share = step / self.warmup_steps
        elif into_decay <= 0:
            return self.initial_lr
        else:
            share = _DECAYS[self.decay](into_decay / self.decay_steps)
        return self.min_lr + (self.initial_lr - self.min_lr) * share


@dataclass(frozen=True)
class OneCycle(Formula):
    """Rises from `max_lr / div_factor` to max_lr, then falls far below the start (Smith and Topin 2018).

    The rise ends at step `pct_start * total_steps - 1` and the fall at step `total_steps - 1`, the last update of the
    run; from there on the rate is `max_lr / div_factor / final_div_factor`. Both follow half a cosine ("cos") or a
    straight line ("linear"). Momentum is not changed.

    >>> schedule = OneCycle(1.0, total_steps=10, pct_start=0.5, div_factor=4.0)
    >>> [round(schedule.get_lr(step), 3) for step in (0, 2, 4, 9)]
    [0.25, 0.625, 1.0, 0.0]

    Raises:
        ConfigurationError: a value is out of range, or the start or the end is above max_lr.
    """

    max_lr: float
    total_steps: int
    pct_start: float = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pct_start > 1:
            raise refused(self, "needs a share of the run, from 0 to 1", "pct_start")
        if self.div_factor < 1:
            raise refused(self, "divides max_lr, so the start is above it; pass at least 1", "div_factor")
        if self.div_factor * self.final_div_factor < 1:
            least = f"{1 / self.div_factor:g}"
            rule = (
                f"ends above max_lr, as the last rate is max_lr / div_factor / final_div_factor; pass at least {least}"
            )
            raise refused(self, rule, "final_div_factor")

    def get_lr(self, step: int) -> float:
        start = self.max_lr / self.div_factor
        peak, last = self.pct_start * self.total_steps - 1, self.total_steps - 1
        step = min(step, last)
        if step < peak:
            return self._between(start, self.max_lr, step / peak)
        if step == peak:
            return self.max_lr
        # a peak before the first update (a very short rise) starts the run inside the fall, as in torch
        return self._between(self.max_lr, start / self.final_div_factor, (step - peak) / (last - peak))

    def _between(self, begin: float, end: float, done: float) -> float:
        if self.anneal_strategy == "linear":
            return begin + (end - begin) * done
        return end + (begin - end) * (1 + math.cos(math.pi * done)) / 2
