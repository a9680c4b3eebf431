"""Schedules with a rise: the warm-up, warm-up with plateau and decay, and the one cycle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.schedules.formula import Formula

__all__ = ["Warmup", "WSD", "OneCycle"]


@dataclass(frozen=True)
class Warmup(Formula):
    """From 0 to target_lr, which it keeps after warmup_steps.

    linear: `target_lr * step / warmup_steps`; exponential: `target_lr * (step / warmup_steps) ** 2`. The first update
    runs at rate 0, so that the rate climbs to the target in equal parts; that is torch's and optax's count of steps.
    """

    target_lr: float
    warmup_steps: int
    strategy: Literal["linear", "exponential"] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_choice("strategy", ("linear", "exponential"))

    def get_lr(self, step: int) -> float:
        if step >= self.warmup_steps:
            return self.target_lr
        done = step / self.warmup_steps
        return self.target_lr * (done if self.strategy == "linear" else done * done)


@dataclass(frozen=True)
class WSD(Formula):
    """Warm-up, stable, decay (Hu et al. 2024, MiniCPM): initial_lr between a linear rise and a late decay.

    The rate is `min_lr + (initial_lr - min_lr) * share`. Over warmup_steps the share is `step / warmup_steps`, so it
    starts at min_lr; over the last decay_steps of total_steps, with t from 0 to 1 in them, it is `1 - t` (linear),
    `(1 + cos(pi * t)) / 2` (cosine) or `1 - sqrt(t)` (sqrt); then min_lr.

    Raises:
        ConfigurationError: a value out of range, or the warm-up and the decay together exceed total_steps.
    """

    initial_lr: float
    total_steps: int
    decay_steps: int
    warmup_steps: int = 0
    min_lr: float = 0.0
    decay: Literal["linear", "cosine", "sqrt"] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_choice("decay", ("linear", "cosine", "sqrt"))
        if self.warmup_steps + self.decay_steps > self.total_steps:
            raise ConfigurationError(
                "is more than {warmup_steps} leaves of {total_steps}; shorten the decay or the warm-up",
                "WSD",
                decay_steps=self.decay_steps,
                warmup_steps=self.warmup_steps,
                total_steps=self.total_steps,
            )

    def get_lr(self, step: int) -> float:
        if step >= self.total_steps:
            return self.min_lr
        into_decay = step - (self.total_steps - self.decay_steps)
        if step < self.warmup_steps:
            share = step / self.warmup_steps
        elif into_decay <= 0:
            return self.initial_lr
        else:
            done = into_decay / self.decay_steps
            if self.decay == "linear":
                share = 1 - done
            elif self.decay == "cosine":
                share = (1 + math.cos(math.pi * done)) / 2
            else:
                share = 1 - math.sqrt(done)
        return self.min_lr + (self.initial_lr - self.min_lr) * share


@dataclass(frozen=True)
class OneCycle(Formula):
    """From `max_lr / div_factor` up to max_lr and down again, far below the start (Smith and Topin 2018).

    The rise ends at step `pct_start * total_steps - 1`, the fall at step `total_steps - 1`, which is the last update
    of the run: it and all after it run at `max_lr / div_factor / final_div_factor`. Both follow half a cosine ("cos")
    or a line. The momentum stays as it is.

    Raises:
        ConfigurationError: a value out of range, or a start or an end above max_lr.
    """

    max_lr: float
    total_steps: int
    pct_start: float = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_choice("anneal_strategy", ("cos", "linear"))
        if self.pct_start > 1:
            raise ConfigurationError("needs a part of the run, from 0 to 1", "OneCycle", pct_start=self.pct_start)
        if self.div_factor < 1:
            raise ConfigurationError(
                "starts above max_lr, which it divides; pass at least 1", "OneCycle", div_factor=self.div_factor
            )
        if self.div_factor * self.final_div_factor < 1:
            raise ConfigurationError(
                f"ends above max_lr, "
                f"for the last rate is max_lr / div_factor / final_div_factor; pass at least {1 / self.div_factor:g}",
                "OneCycle",
                final_div_factor=self.final_div_factor,
            )

    def get_lr(self, step: int) -> float:
        start = self.max_lr / self.div_factor
        peak, last = self.pct_start * self.total_steps - 1, self.total_steps - 1
        step = min(step, last)
        if step < peak:
            return self._between(start, self.max_lr, step / peak)
        if step == peak:
            return self.max_lr
        # a peak before the first update (a short rise) leaves the run inside the fall, as in torch
        return self._between(self.max_lr, start / self.final_div_factor, (step - peak) / (last - peak))

    def _between(self, begin: float, end: float, done: float) -> float:
        if self.anneal_strategy == "linear":
            return begin + (end - begin) * done
        return end + (begin - end) * (1 + math.cos(math.pi * done)) / 2
