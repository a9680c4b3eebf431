"""Frozen weights that are left out of checkpoints: what is saved, and what is still an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pulsetrain.engine.checkpoint import leave_out_frozen


def model() -> nn.Sequential:
    found = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    found[0].requires_grad_(False)
    return leave_out_frozen(found)


LEARNING = {"1.weight", "1.bias", "2.weight", "2.bias"}
BUFFERS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_what_learns_and_buffers_are_saved_and_loaded() -> None:
    one, other = model(), model()
    frozen = other[0].weight.detach().clone()
    assert set(one.state_dict()) == LEARNING | BUFFERS
    other.load_state_dict(one.state_dict())
    assert torch.equal(one[2].weight, other[2].weight)
    assert torch.equal(frozen, other[0].weight)


def test_a_model_inside_another_one_is_saved_likewise() -> None:
    one, other = (nn.ModuleDict({"inner": model(), "head": nn.Linear(1, 1).requires_grad_(False)}) for _ in range(2))
    assert set(one.state_dict()) == {f"inner.{name}" for name in LEARNING | BUFFERS} | {"head.weight", "head.bias"}
    other.load_state_dict(one.state_dict())
    assert torch.equal(one["inner"][2].weight, other["inner"][2].weight)


def test_what_learns_has_to_be_there() -> None:
    state = model().state_dict()
    del state["2.weight"]
    with pytest.raises(RuntimeError, match="Missing key") as error:
        model().load_state_dict(state)
    assert "2.weight" in str(error.value)
    assert "0.weight" not in str(error.value)
