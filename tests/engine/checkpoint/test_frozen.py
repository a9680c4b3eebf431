"""Frozen weights that are left out of checkpoints: what is saved, and what is still an error."""

from __future__ import annotations

from unittest.mock import ANY

import pytest
import torch
from torch import nn

from pulsetrain.engine.checkpoint import frozen, leave_out_frozen
from pulsetrain.engine.checkpoint.frozen import FrozenWeights, check_left_out, leave_out_adapted
from pulsetrain.engine.errors import CheckpointError


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


# ------------------------------------------------------------------------------------------------------- the digest


def test_the_digest_is_of_names_and_values_of_what_is_left_out() -> None:
    torch.manual_seed(0)
    one = model()
    found = FrozenWeights(one).left_out()
    assert found is not None
    assert found["names"] == ["0.weight", "0.bias"]
    assert found["held"] == "whole"
    torch.manual_seed(0)
    other = model()
    with torch.no_grad():
        other[2].weight += 1  # which learns
    assert FrozenWeights(other).left_out() == found
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-6
    changed = FrozenWeights(other).left_out()
    assert changed is not None
    assert changed["digest"] != found["digest"]
    assert FrozenWeights(nn.ModuleDict({"inner": one})).left_out() == {
        **found, "names": ["inner.0.weight", "inner.0.bias"], "digest": ANY
    }  # fmt: skip


def test_values_are_read_again_only_if_they_were_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    weights, reads = FrozenWeights(made), []
    digest = frozen._described  # its calls are counted
    monkeypatch.setattr(frozen, "_described", lambda tensors: reads.append(1) or digest(tensors))
    first = weights.left_out()
    assert weights.left_out() == first
    assert len(reads) == 1
    with torch.no_grad():
        made[0].bias += 1
    assert weights.left_out() != first
    assert len(reads) == 2


def test_frozen_copies_that_come_later_are_neither_saved_nor_named() -> None:
    made = model()
    before = FrozenWeights(made).left_out()
    made.add_module("reference", nn.Linear(1, 1).requires_grad_(False))
    assert FrozenWeights(made).left_out() == before
    assert not any(name.startswith("reference") for name in made.state_dict())


def test_leaving_out_twice_is_once() -> None:
    made = leave_out_frozen(model())
    assert set(made.state_dict()) == LEARNING | BUFFERS
    made.load_state_dict(made.state_dict())


def test_models_of_peft_are_found_inside_of_others() -> None:
    adapted, other = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1)), nn.Linear(2, 1)
    adapted.peft_config = {}
    whole = nn.ModuleDict({"adapted": adapted, "other": other.requires_grad_(False)})
    assert leave_out_adapted(whole)
    assert set(whole.state_dict()) == {"adapted.1.weight", "adapted.1.bias", "other.weight", "other.bias"}
    assert not leave_out_adapted(nn.Sequential(nn.Linear(2, 1).requires_grad_(False)))


def test_other_shards_and_quantised_weights_are_not_compared() -> None:
    made = model()
    found = FrozenWeights(made).left_out()
    assert found is not None
    wrong = {**found, "digest": "0" * 32}
    with pytest.raises(CheckpointError, match="the frozen weights of the model are not those"):
        check_left_out("", wrong, made)
    check_left_out("", {**wrong, "held": "[0] of [2]"}, made)
    check_left_out("", {**wrong, "digest": None}, made)
    with pytest.raises(
        CheckpointError, match=r"the checkpoint leaves 3\.weight to the model, which has no such parameter"
    ):
        check_left_out("", {**found, "names": ["3.weight"]}, made)
