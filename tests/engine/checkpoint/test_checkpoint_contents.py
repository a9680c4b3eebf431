"""Values that a checkpoint may hold are loaded unchanged; others are refused before anything is written."""

from __future__ import annotations

import os
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.errors import CheckpointError
from tests.support.checkpoints import PLAIN, STATE, vouch


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def test_no_code_is_run_by_loading(tmp_path: Path):
    manager = CheckpointManager(tmp_path / "c")
    path = manager.save(STATE)
    torch.save({"x": Evil(tmp_path / "ran")}, path / "state.pt")
    vouch(path)
    with pytest.raises(CheckpointError, match=r"state\.pt: cannot be loaded: .*system") as caught:
        manager.load(path)
    assert "weights_only" not in str(caught.value)  # torch advises to run it
    assert not (tmp_path / "ran").exists()


def test_what_torch_cannot_read_names_the_file(tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    path = manager.save(STATE)
    torch.save([1, 2], path / "state.pt")
    vouch(path)
    with pytest.raises(CheckpointError, match=r"state\.pt: holds a list"):
        manager.load(path)
    (path / "state.pt").write_bytes(b"no zip file at all")
    vouch(path)
    with pytest.raises(CheckpointError, match=r"state\.pt: cannot be loaded"):
        manager.load(path)


Point = namedtuple("Point", "x")  # what a user might save


class Text(str):
    pass


def marked() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.owner = Evil(Path("nobody"))
    return tensor


def test_a_tensors_attributes_are_made_plain_and_the_callers_tensor_keeps_its_own(tmp_path: Path):
    tensor, parameter = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    for each in (tensor, parameter):
        each.scale = np.float64(0.5)
    manager = CheckpointManager(tmp_path)
    loaded = manager.load(manager.save({"tensor": tensor, "parameter": parameter}))
    assert [type(each.scale) for each in loaded.values()] == [float, float]
    assert [type(each) for each in loaded.values()] == [torch.Tensor, torch.nn.Parameter]
    assert [each.requires_grad for each in loaded.values()] == [True, False]
    assert type(tensor.scale) is type(parameter.scale) is np.float64


def circle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Path("a"), r"\['x'\]: pathlib\.[\w.]*PosixPath: could not be loaded again"),
        ({"rates": [0, (1, object())]}, r"\['x'\]\['rates'\]\[1\]\[1\]: object:"),
        ([np.array(["a"])], r"\['x'\]\[0\]: numpy\.ndarray of dtype <U1:"),
        (np.ma.masked_array([1, 2], [0, 1]), r"numpy\.ma\..*MaskedArray of dtype int64:"),
        (np.longdouble(1), r"numpy\.longdouble:"),
        (np.ones(2, np.longdouble), r"numpy\.ndarray of dtype"),
        (np.datetime64("2020-01-01"), r"numpy\.datetime64:"),
        ({1}, "set:"),
        (1j, "complex:"),
        (b"", "bytes of length 0:"),
        (1 << 2039, "int of more than 2039 bits:"),
        (Point(1), "Point:"),
        (Text("a"), "Text:"),
        (marked(), r"\['x'\]\['__dict__'\]\['owner'\]: .*Evil:"),
        (torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "Mine:"),
        ({b"k": 1}, r"\['x'\]\[b'k'\]: key of type bytes:"),
        ({(1, (2, Text("k"))): 1}, "key of type .*Text:"),
        (circle(), "holds itself"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_could_not_be_loaded_are_refused_by_path_before_anything_is_written(
    value: Any, says: str, tmp_path: Path
):
    with pytest.raises(CheckpointError, match=says):
        CheckpointManager(tmp_path).save({"x": value})
    assert list(tmp_path.iterdir()) == []


def test_numpys_numbers_and_arrays_become_torchs_and_the_callers_state_stays(tmp_path: Path):
    read_only = np.arange(3)
    read_only.flags.writeable = False
    state = {
        "scalars": [np.float64(0.5), np.float32(0.5), np.int8(-3), np.bool_(True), np.str_("a")],
        "arrays": (np.ones((2, 3), np.float32), np.ones(()), read_only),
        "odd": {"reversed": np.arange(3)[::-1], "swapped": np.arange(3, dtype=">i4")},
        "keys": {np.int64(3): 1},
    }
    manager = CheckpointManager(tmp_path)
    loaded = manager.load(manager.save(state))
    assert [type(value) for value in loaded["scalars"]] == [float, float, int, bool, str]
    assert loaded["scalars"] == [0.5, 0.5, -3, True, "a"]
    assert [tuple(tensor.shape) for tensor in loaded["arrays"]] == [(2, 3), (), (3,)]
    assert loaded["arrays"][0].dtype == torch.float32
    assert {name: tensor.tolist() for name, tensor in loaded["odd"].items()} == {
        "reversed": [2, 1, 0],
        "swapped": [0, 1, 2],
    }
    assert loaded["keys"] == {3: 1}
    assert isinstance(state["odd"]["swapped"], np.ndarray)


def test_a_modules_versions_and_parameters_survive(tmp_path: Path):
    module = torch.nn.BatchNorm1d(3)
    weights = module.state_dict()
    weights["extra"] = np.ones(2)  # makes a copy necessary
    manager = CheckpointManager(tmp_path)
    path = manager.save({"plain": module.state_dict(), "changed": weights, "parameters": list(module.parameters())})
    loaded = manager.load(path)
    assert loaded["plain"]._metadata == loaded["changed"]._metadata == module.state_dict()._metadata
    assert type(loaded["changed"]) is OrderedDict
    assert all(type(parameter) is torch.nn.Parameter for parameter in loaded["parameters"])


@pytest.mark.slow
@given(value=PLAIN)
def test_accepted_values_are_loaded_unchanged(value: Any, tmp_path_factory: pytest.TempPathFactory):
    manager = CheckpointManager(tmp_path_factory.mktemp("c"))
    assert repr(manager.load(manager.save({"x": value}))["x"]) == repr(value)
