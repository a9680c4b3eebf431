"""A small network, and its optimizer with and without a state that is elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine import OptimizerOffload


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 7))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(8, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone() for each in model.parameters()]


def same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Whether the state dicts hold the same bits."""
    first, second = one.state_dict(), other.state_dict()
    assert first["param_groups"] == second["param_groups"]
    assert first["state"].keys() == second["state"].keys()
    for index, values in first["state"].items():
        assert list(values) == list(second["state"][index])
        if not all(torch.equal(torch.as_tensor(each), second["state"][index][name]) for name, each in values.items()):
            return False
    return True


def to_disk(folder: Path, **options: Any) -> OptimizerOffload:
    return OptimizerOffload(**{"folder": str(folder), "part_bytes": 1000, **options})


HOST = OptimizerOffload(to="host", part_bytes=1000)
