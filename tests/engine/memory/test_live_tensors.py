"""Which tensors count, as what, and until when."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from pulsetrain.engine.memory.live_tensors import LiveTensors

SIZE = 4 * 1000


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def watched(live: LiveTensors, model: nn.Module) -> object:
    return live.watching(model, optimizer_of(model))


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(1000, 1, bias=False)


@pytest.fixture
def live() -> LiveTensors:
    return LiveTensors(torch.device("cpu"))


def test_a_tensor_counts_until_it_is_freed(live: LiveTensors, model: nn.Module) -> None:
    with watched(live, model):
        before = live.total
        made = torch.zeros(1000)
        assert live.total == before + SIZE
        del made
        assert live.total == before
    assert live.peaks["forward"]["activations"] == SIZE


def test_views_and_writes_in_place_count_once(live: LiveTensors, model: nn.Module) -> None:
    with watched(live, model):
        before = live.total
        made = torch.zeros(1000)
        views = made[10:], made.view(10, 100), made.t()
        made.add_(1)
        assert live.total == before + SIZE
        del made
        assert live.total == before + SIZE  # a view keeps it
        del views
        assert live.total == before


def test_a_tensor_that_is_resized_counts_as_it_is(live: LiveTensors, model: nn.Module) -> None:
    with watched(live, model):
        before = live.total
        made = torch.zeros(1000)
        made.resize_(3000)
        assert live.total == before + 3 * SIZE


def test_phases_follow_the_step(live: LiveTensors) -> None:
    model = nn.Sequential(nn.Linear(1, 1000, bias=False), nn.Linear(1000, 1, bias=False))
    optimizer = optimizer_of(model)
    with live.watching(model, optimizer):
        loss = model(torch.ones(2, 1)).sum()
        assert live.phase == "forward"
        loss.backward()
        torch.zeros(1)
        assert live.phase == "update"
        optimizer.step()
        assert live.sizes["optimizer"] == live.sizes["gradients"] == live.sizes["parameters"] == 2 * SIZE
        optimizer.zero_grad()
        assert live.sizes["gradients"] == 0
        live.begin_batch()
        assert live.phase == "forward"
    assert set(live.peaks) == {"forward", "backward", "update"}
    assert live.peaks["backward"]["gradients"] == SIZE  # of the second layer, while that of the first is computed


def test_what_is_kept_is_known_by_module(live: LiveTensors) -> None:
    model = nn.Sequential(nn.Linear(10, 1000), nn.Sequential(nn.Tanh(), nn.Linear(1000, 1)))
    with watched(live, model):
        model(torch.ones(1, 10)).square().sum().backward()
    assert live.saved["1.0"] == SIZE
    assert live.saved["1.1"] == 4
    assert live.saved["loss"] >= 4


def test_an_error_inside_a_module_leaves_nothing_at_work(live: LiveTensors) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(11, 1))
    with pytest.raises(RuntimeError), watched(live, model):
        model(torch.ones(1, 10))
    assert live._modules == []
    assert not any(each._forward_hooks for each in model.modules())


def test_other_devices_do_not_count(model: nn.Module) -> None:
    live = LiveTensors(torch.device("meta"))
    with watched(live, model):
        torch.zeros(1000)
        kept = torch.zeros(1000, device="meta")
        assert live.total == SIZE
        del kept


def test_tensors_without_a_storage_do_not_count(live: LiveTensors, model: nn.Module) -> None:
    with watched(live, model):
        before = live.total
        sparse = torch.eye(10).to_sparse()
        gc.collect()
        assert live.total - before < SIZE
        del sparse


def test_nothing_counts_afterwards(live: LiveTensors, model: nn.Module) -> None:
    with watched(live, model):
        kept = torch.zeros(1000)
    total = live.total
    torch.zeros(1000)
    del kept
    assert live.total == total
