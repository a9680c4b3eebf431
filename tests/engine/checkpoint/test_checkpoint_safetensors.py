"""The safetensors form: states are loaded as they were saved, and other tools can read the file."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint, safetensors_file
from pulsetrain.engine.checkpoint.safetensors_file import read_file
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from tests.support.checkpoints import PLAIN, TENSORS, same, state_file, vouch


def save(state: dict[str, Any], folder: Path) -> Path:
    return CheckpointManager(folder).save(state, form="safetensors")


def back(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    return load_checkpoint(save(state, folder))


def header(path: Path) -> dict[str, Any]:
    content = state_file(path).read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


# ------------------------------------------------------------------------------------------------- there and back


@pytest.mark.slow
@given(value=PLAIN)
def test_accepted_values_are_loaded_unchanged(value: Any, tmp_path_factory: pytest.TempPathFactory):
    assert same(back({"x": value}, tmp_path_factory.mktemp("c"))["x"], value)


@pytest.mark.slow
@given(values=st.lists(TENSORS, max_size=4))
def test_tensors_are_loaded_bit_for_bit(values: list[torch.Tensor], tmp_path_factory: pytest.TempPathFactory):
    loaded = back({"x": values, "y": dict(enumerate(values))}, tmp_path_factory.mktemp("c"))
    assert same(loaded["x"], values)
    assert same(loaded["y"], dict(enumerate(values)))


def test_values_that_python_alone_has_are_loaded_as_they_were(tmp_path: Path):
    quiet_nan = struct.unpack(">d", bytes.fromhex("fff80000000000ab"))[0]  # a NaN with a sign and a payload
    state = {
        "floats": [0.1, -0.0, 5e-324, float("inf"), float("-inf"), quiet_nan],
        "history": [1 / 3, quiet_nan, -0.0] * 100,
        "whole": tuple([0.5] * 100),
        "numbers": [0, -1, True, False, (1 << 2039) - 1, 1.0],
        "keys": {0: "int", 0.5: "float", None: "none", (1, ("a", 2.0)): "tuple", "0": "text"},
        "torch": [torch.Size([2, 0]), torch.bfloat16, torch.device("cuda", 1), torch.Size([])],
        "empty": [{}, [], (), OrderedDict(), ""],
        "names of the file": {"tensor": 1, "dict": [2], "tuple": {"floats": (3,)}, "__metadata__": None},
        "bytes": b"\x00\xff",
    }
    assert same(back(state, tmp_path), state)


def test_a_modules_versions_and_parameters_and_a_tensors_attributes_survive(tmp_path: Path):
    module = torch.nn.BatchNorm1d(3)
    marked = torch.ones(2, requires_grad=True)
    marked.scale, marked.by = np.float64(0.5), {"rows": torch.arange(2)}
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    loaded = back({"model": module.state_dict(), "parameters": [*module.parameters(), frozen, marked]}, tmp_path)
    assert loaded["model"]._metadata == module.state_dict()._metadata
    assert type(loaded["model"]) is OrderedDict
    assert [type(each) for each in loaded["parameters"]] == [torch.nn.Parameter] * 3 + [torch.Tensor]
    assert [each.requires_grad for each in loaded["parameters"]] == [True, True, False, True]
    assert type(loaded["parameters"][3].scale) is float
    assert same(vars(loaded["parameters"][3]), {"scale": 0.5, "by": {"rows": torch.arange(2)}})
    assert type(marked.scale) is np.float64, "the caller's tensor has been changed"


def test_strides_that_a_dense_tensor_has_are_loaded_and_others_are_not_written(tmp_path: Path):
    image = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {"image": image, "part": torch.arange(36).reshape(6, 6)[::2, 1::2], "wide": torch.ones(3, 1).expand(3, 400)}
    path = save(state, tmp_path)
    loaded = load_checkpoint(path)
    assert same(loaded, state)
    assert [loaded[name].stride() for name in state] == [image.stride(), (3, 1), (400, 1)]
    assert header(path)["part"]["shape"] == [3, 3]


def test_tied_tensors_are_written_once_and_are_tied_again(tmp_path: Path):
    weight = torch.arange(1000.0)
    state = {"in": weight, "out": weight.detach(), "turned": weight.reshape(10, 100).T, "half": weight[:500]}
    path = save(state, tmp_path)
    loaded = load_checkpoint(path)
    assert same(loaded, state)
    assert [name for name in header(path) if name != "__metadata__"] == ["in", "turned", "half"]
    loaded["in"][0] = 7.0
    assert loaded["out"][0] == 7.0


def test_empty_tensors_are_kept_apart(tmp_path: Path):
    state = {"a": torch.empty(0), "b": torch.empty(0, requires_grad=True), "c": torch.empty(3, 0, dtype=torch.int8)}
    loaded = back(state, tmp_path)
    assert same(loaded, state)
    assert [each.requires_grad for each in loaded.values()] == [False, True, False]


def test_conjugated_and_negated_views_keep_their_numbers(tmp_path: Path):
    base = torch.tensor([1 + 2j, 3 - 4j])
    state = {"base": base, "conjugated": base.conj(), "negated": base.conj().imag}
    assert same(back(state, tmp_path), {name: value.resolve_conj().resolve_neg() for name, value in state.items()})


# --------------------------------------------------------------------------------------------------------- the names


def test_arrays_have_the_names_of_their_places(tmp_path: Path):
    state = {
        "model": {"hidden/kernel": torch.ones(2, 3)},
        "optimizer": {"state": {0: {"mu": torch.ones(1)}}},
        "history": {"train/loss": [0.5] * 64, "short": [0.5] * 63},
    }
    names = set(header(save(state, tmp_path))) - {"__metadata__"}
    assert names == {"model/hidden/kernel", "optimizer/state/0/mu", "history/train/loss"}


def test_equal_paths_do_not_collide(tmp_path: Path):
    state = {
        "a/b": torch.tensor(1), "a": {"b": torch.tensor(2), "b~2": torch.tensor(3)}, "": {"": torch.tensor(4)},
        "/": torch.tensor(5), "__metadata__": torch.tensor(6), "keys": {0: torch.tensor(7), "0": torch.tensor(8)},
        "\ud800": torch.tensor(9), "\\ud800": torch.tensor(10), "None": {None: torch.tensor(11)},
    }  # fmt: skip
    path = save(state, tmp_path)
    assert same(load_checkpoint(path), state)
    load_file = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed").load_file
    assert sorted(int(value) for value in load_file(state_file(path)).values()) == list(range(1, 12))


# --------------------------------------------------------------------------------------------------- other programs


@pytest.mark.slow
@given(values=st.lists(TENSORS, max_size=5))
def test_the_safetensors_package_reads_our_files_mapped_and_from_bytes(
    values: list[torch.Tensor], tmp_path_factory: pytest.TempPathFactory
):
    torch_form = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    file = state_file(save({"x": values}, tmp_path_factory.mktemp("c")))
    mapped, parsed = torch_form.load_file(file), torch_form.load(file.read_bytes())
    assert mapped.keys() == parsed.keys() == {f"x/{index}" for index in range(len(values))}
    for index, value in enumerate(values):
        expected = value.detach()
        if value.dtype is torch.complex128:  # not supported by safetensors: stored as its bytes
            expected = expected.contiguous().unsqueeze(-1).view(torch.uint8)
        assert same(mapped[f"x/{index}"], expected)
        assert same(parsed[f"x/{index}"], expected)


def test_each_array_begins_where_a_program_that_maps_the_file_can_use_it(tmp_path: Path):
    kinds = (torch.bool, torch.float64, torch.bfloat16, torch.int32)
    for extra in range(8):  # letters that make the header longer
        path = save({f"{'x' * extra}{kind}": torch.ones(3).to(kind) for kind in kinds}, tmp_path)
        entries = header(path)
        entries.pop("__metadata__")
        begin = 8 + int.from_bytes(state_file(path).read_bytes()[:8], "little")
        for entry in entries.values():
            start, end = entry["data_offsets"]
            assert (begin + start) % ((end - start) // 3) == 0


@pytest.mark.slow
@given(arrays=st.dictionaries(st.text(max_size=3), TENSORS.filter(lambda each: each.dtype is not torch.complex128)))
def test_what_the_package_writes_is_read(arrays: dict[str, torch.Tensor]):
    torch_form = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    own = {name: value.detach().clone().contiguous() for name, value in arrays.items() if name != "__metadata__"}
    found, metadata = read_file(BytesIO(torch_form.save(own, {"a": "b"})))
    assert same(dict(sorted(found.items())), dict(sorted(own.items())))
    assert metadata == {"a": "b"}


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([torch.eye(3).to_sparse()], r"checkpoint\['x'\]\[0\]: a tensor that is torch.sparse_coo, .*form='torch'"),
        (torch.empty(2, device="meta"), r"\['x'\]: a tensor that is without values"),
        ({1}, "set: could not be loaded again"),
    ],
    ids=["sparse", "meta", "set"],
)
def test_unsupported_values_are_refused_by_path_before_anything_is_written(value: Any, says: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=says):
        save({"x": value}, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_tensor_is_refused_too(tmp_path: Path):
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(CheckpointError, match=r"checkpoint\['x'\]: a tensor that is quantized"):
        save({"x": tensor}, tmp_path)


def test_the_deepest_container_that_is_accepted_is_loaded(tmp_path: Path):
    def nested(levels: int) -> dict[str, Any]:
        value: Any = 1
        for _ in range(levels):
            value = {0: [(value,)]}
        return {"x": value}

    assert same(back(nested(33), tmp_path), nested(33))
    with pytest.raises(CheckpointError, match=r"checkpoint\['x'\]\[0\]\[0\]\.\.\.: holds a container that is too deep"):
        save(nested(34), tmp_path)


def test_more_beside_the_arrays_than_a_header_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(safetensors_file, "_HEADER_LIMIT", 4096)
    state = {"steps": [*range(2000)]}
    with pytest.raises(CheckpointError, match=r"take \d+ bytes, .* room for 4096; keep long lists of numbers as tens"):
        save(state, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert same(back({"steps": torch.arange(2000), "losses": [0.5] * 2000}, tmp_path)["losses"], [0.5] * 2000)


def test_an_unknown_form_is_refused_with_the_nearest_one(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"save\(form='safetensor'\): unknown; .*mean 'safetensors'"):
        CheckpointManager(tmp_path).save({}, form="safetensor")  # type: ignore[arg-type]


def written(folder: Path) -> tuple[Path, bytes]:
    path = save({"w": torch.arange(3.0), "n": [7, 0.5], "half": torch.ones(1, dtype=torch.bfloat16)}, folder)
    return path, state_file(path).read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b'"F32"', b'"X32"', "w has the unknown dtype X32"),
        (b'"shape":[3]', b'"shape":[9]', "w has bytes 0 to 12, which do not fit its shape .*"),
        (b"[12,14]", b"[11,13]", "half has bytes 11 to 13, which do not fit its shape .*"),
        (b'"w":{"dtype"', b'"v":{"dtype"', "it lacks the array w"),
        (b"pulsetrain.checkpoint", b"somebodys.......thing", "it holds only arrays"),
        (b'\\"dict\\"', b'\\"dikt\\"', "it holds values of an unknown kind: dikt"),
    ],
)
def test_an_inconsistent_file_is_reported_with_the_reason(old: bytes, new: bytes, says: str, tmp_path: Path):
    path, content = written(tmp_path)
    assert content.count(old) == 1
    state_file(path).write_bytes(content.replace(old, new))
    vouch(path)
    with pytest.raises(
        CheckpointError, match=rf"state\.safetensors: cannot be loaded: {says}; load another checkpoint"
    ):
        load_checkpoint(path)


@pytest.mark.parametrize(("change", "says"), [(b"\x00", "bytes follow its last array"), (b"", "ends too early")])
def test_a_file_of_the_wrong_length_is_reported(change: bytes, says: str, tmp_path: Path):
    path, content = written(tmp_path)
    state_file(path).write_bytes(content + change if change else content[:-1])
    vouch(path)
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(path)


@pytest.mark.slow
def test_whatever_a_manifest_vouches_for_is_loaded_or_refused_by_one_error(tmp_path: Path):
    path, content = written(tmp_path)
    refused = 0
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        state_file(path).write_bytes(damaged)
        vouch(path)
        try:
            load_checkpoint(path)
        except CheckpointError:
            refused += 1
    assert refused > len(content) // 2


# ---------------------------------------------------------------------------------------------------------- memory


def test_neither_writing_nor_reading_makes_bytes_of_the_arrays(tmp_path: Path):
    """Of a tensor's memory python knows nothing: what it knows of is what comes on top of it."""
    each = 1 << 20
    state = {str(number): torch.full((each,), number, dtype=torch.uint8) for number in range(8)}
    manager = CheckpointManager(tmp_path)
    manager.save({"first": 1})
    tracemalloc.start()
    path = manager.save(state, form="safetensors")
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    loaded = manager.load(path)
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert same(loaded, state)
    assert max(written, read) < 2 * each  # one of them for the buffer of the written file
