"""A small model and its data, shared by these tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import SupervisedStrategy


def regression_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))


def pairs(rows: int = 40, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(rows, 1, generator=generator))


def loader(rows: int = 40, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(pairs(rows), batch_size=batch_size, **{"shuffle": True, **options})


class Tokens(nn.Module):
    """A language model of one table: logits of the next token from the present one."""

    def __init__(self, vocabulary: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def trainer(config: dict[str, Any] | None = None, **arguments: Any) -> Trainer:
    settings = {"optimizer": "sgd", "learning_rate": 0.01, "log_every_n_steps": 5, **(config or {})}
    arguments.setdefault("strategy", SupervisedStrategy("mse"))
    model = arguments.pop("model", None) or regression_model()
    data = arguments.pop("train_loader", None)
    return Trainer(model, loader() if data is None else data, config=TrainingConfig(**settings), **arguments)
