"""Learning rates of PyTorch's schedulers, to compare schedules with."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

# By the name of a schedule: its parameters that have no default and do not follow from the length of the run.
NEEDED = {"step": {"step_size": 3}, "multi_step": {"milestones": (5, 8)}, "exponential": {"gamma": 0.99}}


def optimizer_at(*rates: float, default: float | torch.Tensor | None = None) -> torch.optim.Optimizer:
    """An SGD with one group for each rate; its default rate is the first one's unless given."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=rates[0] if default is None else default, momentum=0.9)


def used_rates(scheduler: LRScheduler, updates: int, *arguments: Any) -> list[list[float]]:
    """The groups' rates at each of the next updates: read the rates, make the update, step the scheduler."""
    rates = []
    for _ in range(updates):
        rates.append([float(group["lr"]) for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step(*arguments)
    return rates


def first_group(rates: list[list[float]]) -> list[float]:
    return [row[0] for row in rates]


def rates_of(
    make_scheduler: Callable[[torch.optim.Optimizer], LRScheduler], initial_lr: float, steps: int
) -> list[float]:
    """Torch's rate after n calls of step(), for each n below steps."""
    return first_group(used_rates(make_scheduler(optimizer_at(initial_lr)), steps))


def through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """The state as torch loads it without unpickling anything."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded
