"""The averaged weights of schedule-free optimizers (Defazio et al. 2024), lent for as long as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["averaged_weights", "begin_training", "is_schedule_free"]


def is_schedule_free(optimizer: Any) -> bool:
    """Whether it keeps an average of the weights beside those it trains, as the package schedulefree does."""
    return hasattr(optimizer, "eval") and hasattr(optimizer, "train") and "train_mode" in optimizer.defaults


def begin_training(optimizer: Any) -> None:
    """Makes the parameters of a schedule-free optimizer those it trains; it refuses to step before."""
    optimizer.train()
    optimizer.defaults["train_mode"] = True  # for a group added later, whose weights eval() would else leave out


@contextmanager
def averaged_weights(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the parameters of a schedule-free optimizer are the averaged ones, which validation and users want.

    Behind it they are bit for bit what they were, after an exception too. Costs one copy of the weights; with any other
    optimizer, or inside itself, it does nothing. BatchNorm's running statistics stay those of the training weights.
    """
    if not is_schedule_free(optimizer) or not optimizer.param_groups[0]["train_mode"]:
        yield
        return
    trained: Any = optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # eval() and train() compute the one from the other and round: without copies each round trip would change bits
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        trained.eval()
        yield
    finally:
        trained.train()
        with torch.no_grad():
            for parameter, before in zip(parameters, kept, strict=True):
                parameter.copy_(before)
