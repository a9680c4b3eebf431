"""Trainers for several processes that train one small model together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import SupervisedStrategy

__all__ = ["linear", "make"]


def make(model: nn.Module, loader: Any, *handlers: Any, val_loader: Any = None, **config: Any) -> Trainer:
    settings = {"max_epochs": 2, "optimizer": "sgd", "learning_rate": 0.1, "seed": 3, "log_every_n_steps": 1, **config}
    return Trainer(
        model,
        loader,
        val_loader,
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(**settings),
        handlers=list(handlers),
    )


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)
