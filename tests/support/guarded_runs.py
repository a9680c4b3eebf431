"""Data with bad rows, and trainers that run on it with guards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import SupervisedStrategy

ROWS, BATCH = 64, 4


def data(bad_rows: tuple[int, ...] = (), scale: float = float("nan")) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 4, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    for row in bad_rows:
        inputs[row, 2] = scale if scale != scale else inputs[row, 2]
        targets[row] *= scale if scale == scale else 1.0
    return TensorDataset(inputs, targets)


def make(
    *handlers: Any,
    dataset: TensorDataset | None = None,
    model: nn.Module | None = None,
    shuffle: bool = False,
    **settings: Any,
) -> Trainer:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    options = {"max_epochs": 1, "optimizer": "adamw", "learning_rate": 0.01, "schedule": None, "seed": 3}
    return Trainer(
        model,
        DataLoader(dataset or data(), batch_size=BATCH, shuffle=shuffle),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(**{**options, **settings}),
        handlers=list(handlers),
    )
