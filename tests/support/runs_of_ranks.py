"""Trainers for several processes that train one small model together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import SupervisedStrategy

__all__ = ["linear", "make", "make_with"]


def make(model: nn.Module, loader: Any, *handlers: Any, val_loader: Any = None, **config: Any) -> Trainer:
    return make_with(model, loader, val_loader, *handlers, **config)


def make_with(
    model: nn.Module, loader: Any, val_loader: Any, *handlers: Any, backend: Any = None, **config: Any
) -> Trainer:
    """By default two epochs with SGD; an optimizer among the settings may be an instance."""
    optimizer = config.pop("optimizer", "sgd")
    settings: dict[str, Any] = {"max_epochs": 2, "seed": 3, "log_every_n_steps": 1}
    if isinstance(optimizer, str):
        settings |= {"optimizer": optimizer, "learning_rate": 0.1}
    return Trainer(
        model,
        loader,
        val_loader,
        strategy=SupervisedStrategy("mse"),
        optimizer=None if isinstance(optimizer, str) else optimizer,
        backend=backend,
        config=TrainingConfig(**{**settings, **config}),
        handlers=list(handlers),
    )


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)
