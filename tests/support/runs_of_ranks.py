"""Trainers for several processes that train one small model together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Every, SupervisedStrategy
from pulsetrain.handlers import Checkpointer, EventRecorder
from tests.support.models import pairs
from tests.support.ranks import in_processes

__all__ = [
    "RANKS",
    "double",
    "dropping",
    "in_one_process",
    "linear",
    "make",
    "make_with",
    "shared_loader",
    "weights_of",
]

RANKS = 2


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


def shared_loader(rank: int, rows: int, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    data = pairs(rows)
    sampler: Any = DistributedSampler(data, RANKS, rank, **options)
    return DataLoader(data, batch_size, sampler=sampler)


def double(rows: int) -> TensorDataset:
    return TensorDataset(*(each.double() for each in pairs(rows).tensors))


def in_one_process(body: Any, *, forked: bool = False) -> Any:
    """What the body gives alone; in a process of its own if it ends that."""
    if not forked:
        return body(0)

    def alone(rank: int) -> Any:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        return body(rank)

    return in_processes(alone, 1)[0]


def dropping(folder: Path, *handlers: Any, **config: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1)).double()
    saving = Checkpointer(folder, Every(iterations=2), keep_last=20)
    recorder = EventRecorder(folder)
    return make(
        model, DataLoader(double(17), 4, shuffle=True), saving, recorder, *handlers, **{"max_epochs": 3, **config}
    )


def weights_of(made: Trainer) -> Any:
    return [each.tolist() for each in made.model.parameters()]
