"""Temporary access to the averaged weights of schedule-free optimizers (Defazio et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["averaged_weights", "begin_training", "is_schedule_free"]


def is_schedule_free(optimizer: object) -> bool:
    """Whether the optimizer keeps an average of the weights it trains, as those of the package schedulefree do.

    >>> is_schedule_free(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
    False
    """
    return (
        hasattr(optimizer, "eval")
        and hasattr(optimizer, "train")
        and "train_mode" in getattr(optimizer, "defaults", ())
    )


def begin_training(optimizer: Any) -> None:
    """Puts a schedule-free optimizer into train mode, without which it rejects `step()`."""
    optimizer.train()
    optimizer.defaults["train_mode"] = True  # for a group added later, whose weights eval() would skip otherwise


@contextmanager
def averaged_weights(optimizer: Any) -> Iterator[None]:
    """Inside, the parameters of a schedule-free optimizer hold the averaged weights, for validation and inference.

    On exit, also after an exception, the training weights are restored bit for bit. It costs one copy of the weights.
    For any other optimizer, or when nested, it does nothing. BatchNorm's running statistics remain those of the
    training weights.

    >>> model = torch.nn.Linear(2, 2)
    >>> with averaged_weights(torch.optim.SGD(model.parameters(), lr=0.1)):  # not schedule-free: no effect
    ...     output = model(torch.ones(2))
    """
    if not is_schedule_free(optimizer) or not optimizer.param_groups[0]["train_mode"]:
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # eval() and train() compute one set of weights from the other and round: without copies a round trip changes bits
    saved = [parameter.detach().clone() for parameter in parameters]
    try:
        optimizer.eval()
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for parameter, before in zip(parameters, saved, strict=True):
                parameter.copy_(before)
