"""A model with every kind of tensor that an average has to handle, and averages of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from pulsetrain.engine.step.averaging import WeightAverage

RULES = {"ema": get_ema_multi_avg_fn(0.9), "swa": get_swa_multi_avg_fn()}


class Mixed(nn.Module):
    """Parameters of two dtypes, one of them shared; batch normalisation; a derived buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.low = nn.Linear(4, 2).to(torch.bfloat16)
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.low(self.second(self.norm(self.first(x))).to(torch.bfloat16))


def train(model, steps=1):
    """Changes the weights and the statistics."""
    with torch.no_grad():
        for _ in range(steps):
            model(torch.randn(8, 4))
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))


def averaged(model, rule="ema", updates=3):
    average = WeightAverage(model, RULES[rule])
    for _ in range(updates):
        train(model)
        average.update()
    train(model)
    return average


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
