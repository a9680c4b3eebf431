"""Snapshots: what they copy, which tensors still share memory, and which memory they reuse."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pulsetrain.engine import CheckpointError
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.checkpoint.snapshot import Snapshot


def pointers(state: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.untyped_storage().data_ptr() for name, tensor in state.items()}


def test_in_place_changes_by_training_do_not_change_the_snapshot():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()

    step()
    live = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": {"loss": [1.0, 2]}}
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    copy = Snapshot().copy(live)
    step()
    live["history"]["loss"].append(3.0)
    assert all(torch.equal(copy["model"][name], expected[name]) for name in expected)
    assert not torch.equal(model.state_dict()["0.weight"], expected["0.weight"])  # the step has changed the weights
    assert torch.equal(copy["optimizer"]["state"][0]["exp_avg"], moments)
    assert copy["history"] == {"loss": [1.0, 2]}


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64],
    ids=str,
)
def test_every_dtype_is_kept_bit_for_bit(dtype: torch.dtype):
    tensor = torch.arange(7).to(dtype)
    copy = Snapshot().copy({"x": tensor})["x"]
    assert copy.dtype == dtype
    assert copy.untyped_storage().tolist() == tensor.untyped_storage().tolist()


def test_nan_keeps_its_bits():
    tensor = torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
    copy = Snapshot().copy({"x": tensor})["x"]
    assert math.isnan(copy[0])
    assert copy.view(torch.int32).tolist() == [0x7FC00001, -1]


def test_two_names_of_one_storage_stay_one():
    flat = torch.arange(10.0)
    copy = Snapshot().copy({"flat": flat, "head": flat[:4], "tail": flat[4:].view(2, 3), "other": torch.arange(10.0)})
    copy["flat"][5] = -1.0
    assert copy["tail"].tolist() == [[4.0, -1.0, 6.0], [7.0, 8.0, 9.0]]
    assert copy["head"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert copy["other"][5] == 5.0
    assert flat[5] == 5.0


def test_strides_and_empty_tensors_and_scalars_are_kept():
    state = {
        "transposed": torch.arange(6.0).view(2, 3).T,
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(5),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }
    copy = Snapshot().copy(state)
    for name, tensor in state.items():
        assert (copy[name].stride(), copy[name].shape) == (tensor.stride(), tensor.shape)
        assert torch.equal(copy[name], tensor)


def test_tensors_without_a_plain_storage_are_copied_too():
    base = torch.tensor([1 + 2j, 3 - 4j])
    sparse = torch.eye(3).to_sparse()
    copy = Snapshot().copy({"conj": base.conj(), "negative": base.conj().imag, "sparse": sparse})
    base.zero_()
    sparse.values().zero_()
    assert copy["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert copy["negative"].tolist() == [-2.0, 4.0]
    assert torch.equal(copy["sparse"].to_dense(), torch.eye(3))


def test_parameters_and_attributes_are_kept():
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    parameter.decay = [1, torch.zeros(1)]
    leaf = torch.ones(2, requires_grad=True)
    copy = Snapshot().copy({"parameter": parameter, "leaf": leaf})
    parameter.decay[1].add_(1)
    assert type(copy["parameter"]) is nn.Parameter
    assert copy["parameter"].requires_grad is False
    assert copy["parameter"].decay == [1, torch.zeros(1)]
    assert copy["leaf"].requires_grad


def test_containers_keep_their_kinds():
    ordered = OrderedDict(a=torch.ones(1))
    ordered._metadata = {"version": [2]}
    array = np.arange(3)
    state: dict[str, Any] = {
        "ordered": ordered,
        "tuple": (1, [2.0, None], "x"),
        "array": array,
        "size": torch.Size([2]),
    }
    copy = Snapshot().copy(state)
    ordered._metadata["version"].append(3)
    array[:] = 9
    assert type(copy["ordered"]) is OrderedDict
    assert copy["ordered"]._metadata == {"version": [2]}
    assert copy["tuple"] == (1, [2.0, None], "x")
    assert copy["array"].tolist() == [0, 1, 2]
    assert copy["size"] == torch.Size([2])


def test_it_is_saved_and_loaded_as_the_state_itself_would_be(tmp_path: Path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    state = {"model": model.state_dict(), "rng": torch.get_rng_state(), "numbers": [1, 2.0, "three", None, b"4"]}
    manager = CheckpointManager(tmp_path)
    direct = manager.load(manager.save(state))
    through = manager.load(manager.save(Snapshot().copy(state)))
    assert through.keys() == direct.keys()
    assert all(torch.equal(through["model"][name], tensor) for name, tensor in direct["model"].items())
    assert through["model"]._metadata == direct["model"]._metadata
    tied = [through["model"][name].untyped_storage().data_ptr() for name in ("0.weight", "1.weight")]
    assert tied[0] == tied[1]
    assert torch.equal(through["rng"], direct["rng"])
    assert through["numbers"] == direct["numbers"]


def test_the_next_one_uses_the_same_memory():
    snapshot = Snapshot()
    state = {"a": torch.zeros(100), "b": torch.zeros(200)}
    first = pointers(snapshot.copy(state))
    state["a"].add_(1)
    again = snapshot.copy(state)
    assert pointers(again) == first
    assert again["a"].tolist() == [1.0] * 100


def test_memory_is_reallocated_only_for_changed_sizes_and_freed_for_removed_tensors():
    snapshot = Snapshot()
    state = {"a": torch.zeros(100), "b": torch.zeros(200)}
    first = snapshot.copy(state)
    before = pointers(first)
    state["b"] = torch.zeros(300)
    state["c"] = torch.zeros(400)
    after = pointers(snapshot.copy(state))
    assert after["a"] == before["a"]
    assert len(set(after.values())) == 3
    del state["c"], state["b"]
    (kept,) = snapshot.copy(state).values()
    assert kept.untyped_storage().data_ptr() == before["a"]
    assert snapshot.nbytes == 400


def test_equal_sizes_never_share_memory():
    snapshot = Snapshot()
    state = {"a": torch.zeros(64), "b": torch.ones(64)}
    snapshot.copy(state)
    copy = snapshot.copy(state)
    assert [copy["a"].tolist(), copy["b"].tolist()] == [[0.0] * 64, [1.0] * 64]


def test_a_state_that_holds_itself_is_refused():
    state: dict[str, Any] = {"a": 1}
    state["self"] = state
    with pytest.raises(CheckpointError, match="holds itself"):
        Snapshot().copy(state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_device_come_to_pinned_host_memory_whole():
    snapshot = Snapshot()
    weight = torch.arange(1_000_000.0, device="cuda")
    for step in range(3):
        weight.add_(1)
        copy = snapshot.copy({"weight": weight, "view": weight[10:]})
        weight.mul_(1)  # later changes on the device do not change the copy
        assert copy["weight"].device.type == "cpu"
        assert copy["weight"].is_pinned()
        assert torch.equal(copy["weight"], torch.arange(1_000_000.0) + step + 1)
        assert copy["view"].untyped_storage().data_ptr() == copy["weight"].untyped_storage().data_ptr()


def test_memory_that_was_prepared_is_what_the_first_copy_is_made_in():
    shared = torch.randn(100)
    state = {"model": {"a": shared, "b": shared[10:20], "c": torch.ones(7)}, "count": 3}
    snapshot = Snapshot()
    make = snapshot.prepare(state)
    assert snapshot.nbytes == 0
    make()
    prepared = snapshot.nbytes
    assert prepared == 400 + 28
    copy = snapshot.copy(state)
    assert snapshot.nbytes == prepared
    assert torch.equal(copy["model"]["a"], shared)
    assert torch.equal(copy["model"]["b"], shared[10:20])
