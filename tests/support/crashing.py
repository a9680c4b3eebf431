"""Runs that crash, for the tests of the bundle that is left of them."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Engine
from pulsetrain.engine.strategies import SupervisedStrategy

SECRET = "hunter2-hunter2"
BAD_ROW = 13


class Refusing(SupervisedStrategy):
    """Raises where the loss is no number."""

    def compute_loss(self, outputs, batch):
        password = SECRET
        loss = super().compute_loss(outputs, batch)
        if not bool(loss.isfinite()):
            raise FloatingPointError(f"no number, and {len(password)} more")
        return loss


class Rows(Dataset):
    def __init__(self, broken=None):
        self.broken = broken

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == self.broken:
            raise IndexError(f"row {index} is broken")
        return torch.full((3,), float(index)), torch.ones(1)


def planted(rows=20):
    inputs = torch.randn(rows, 3)
    inputs[BAD_ROW, 1] = float("nan")
    return TensorDataset(inputs, torch.ones(rows, 1))


def trainer(data, *handlers, validation=None, **config):
    torch.manual_seed(0)
    return Trainer(
        nn.Linear(3, 1),
        DataLoader(data, batch_size=4, shuffle=True),
        validation,
        strategy=Refusing("mse"),
        config=TrainingConfig(**{"max_epochs": 2, "seed": 1, "optimizer": "adamw", **config}),
        handlers=handlers,
    )


def crashed(run, error=Exception):
    with pytest.raises(error) as caught:
        run()
    return caught.value


class Tensorless:
    def __getattr__(self, name):
        raise OSError("nobody may look")


def breaking(batch, at=1):
    def step(engine, given):
        if engine.state.iteration == at:
            raise ValueError("boom")
        return 1.0 / engine.state.iteration

    return Engine(step, name="trainer"), [batch] * 3
