"""Loading only weights: by prefix, with errors that name mismatches, and to and from safetensors files."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from pulsetrain.engine.checkpoint import CheckpointManager, load_safetensors, load_weights, save_safetensors
from pulsetrain.engine.errors import CheckpointError, ConfigurationError


def network(seed: int = 0, width: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleDict({"body": nn.Linear(2, width), "norm": nn.BatchNorm1d(width), "head": nn.Linear(width, 1)})


class Tied(nn.Module):
    """An embedding that is the last layer's matrix too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 4)
        self.output = nn.Linear(4, 5, bias=False)
        self.output.weight = self.embedding.weight


def same(first: nn.Module, second: nn.Module) -> bool:
    mine, others = first.state_dict(), second.state_dict()
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def saved(model: nn.Module, folder: Path) -> Path:
    return CheckpointManager(folder).save({"model": model.state_dict(), "optimizer": {}})


def test_the_weights_of_a_checkpoint_are_loaded_whole(tmp_path: Path):
    source, model = network(0), network(1)
    assert not load_weights(model, saved(source, tmp_path))
    assert same(model, source)


def test_a_checkpoint_that_is_nothing_but_weights_is_loaded_too(tmp_path: Path):
    source, model = network(0), network(1)
    path = CheckpointManager(tmp_path).save(source.state_dict())
    load_weights(model, path, key=None)
    assert same(model, source)


def test_what_does_not_fit_is_listed_by_name_with_both_sides_and_nothing_is_loaded(tmp_path: Path):
    path = saved(nn.ModuleDict({"body": nn.Linear(2, 4), "tail": nn.Linear(1, 1, bias=False)}), tmp_path)
    model = nn.ModuleDict({"body": nn.Linear(2, 3), "head": nn.Linear(3, 1, bias=False)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, path)
    assert str(caught.value) == (
        f"load_weights({str(path)!r}): does not fit the model: missing: head.weight (1, 3); "
        "unexpected: tail.weight (1, 1); shape: body.weight is (4, 2) in the checkpoint, (3, 2) in the model; "
        "shape: body.bias is (4,) in the checkpoint, (3,) in the model; "
        "pulsetrain.engine.checkpoint.load_weights(..., strict=False) loads what fits"
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_not_strict_loads_what_fits_and_returns_what_did_not(tmp_path: Path):
    source, model = network(0), network(1)
    source["head"], model["extra"] = nn.Linear(3, 2), nn.Linear(1, 1, bias=False)
    head = model["head"].weight.clone()
    mismatch = load_weights(model, saved(source, tmp_path), strict=False)
    assert mismatch.missing == {"extra.weight": (1, 1)}
    assert mismatch.unexpected == {}
    assert mismatch.misshapen == {"head.weight": ((2, 3), (1, 3)), "head.bias": ((2,), (1,))}
    assert same(model["body"], source["body"])
    assert torch.equal(model["head"].weight, head)


def test_a_part_is_loaded_by_its_prefix_under_its_own_or_another_name(tmp_path: Path):
    source = network(0)
    path = saved(source, tmp_path)
    part = nn.Linear(2, 3)
    load_weights(part, path, prefix="body.")
    assert same(part, source["body"])

    model = nn.ModuleDict({"encoder": nn.Linear(2, 3), "classifier": nn.Linear(3, 9)})
    classifier = model["classifier"].weight.clone()
    load_weights(model, path, prefix="body.", new_prefix="encoder.")  # strict, within the encoder
    assert same(model["encoder"], source["body"])
    assert torch.equal(model["classifier"].weight, classifier)

    whole = nn.ModuleDict({"inner": network(1), "other": nn.Linear(1, 1)})
    load_weights(whole, path, new_prefix="inner.")
    assert same(whole["inner"], source)


@pytest.mark.parametrize("strict", [True, False])
def test_an_unknown_prefix_is_an_error_that_names_the_entries(strict: bool, tmp_path: Path):
    path = saved(nn.Linear(1, 1), tmp_path)
    with pytest.raises(CheckpointError, match=r"no entry begins with prefix='layer\.'; there are weight, bias"):
        load_weights(nn.Linear(1, 1), path, prefix="layer.", strict=strict)


def test_a_checkpoint_without_such_weights_says_what_it_has(tmp_path: Path):
    path = saved(nn.Linear(1, 1), tmp_path)
    with pytest.raises(CheckpointError, match=r"load_weights\(key=.ema.\): .*choose a key that it has: model, opt"):
        load_weights(nn.Linear(1, 1), path, key="ema")


def test_a_damaged_checkpoint_is_refused_here_too(tmp_path: Path):
    path = saved(nn.Linear(1, 1), tmp_path)
    (path / "state.pt").write_bytes((path / "state.pt").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut or damaged"):
        load_weights(nn.Linear(1, 1), path)


def test_values_take_the_models_dtype(tmp_path: Path):
    source, model = network(0), network(1).to(torch.bfloat16)
    load_weights(model, saved(source, tmp_path))
    assert torch.equal(model["body"].weight, source["body"].weight.to(torch.bfloat16))


def test_safetensors_itself_reads_what_we_write(tmp_path: Path):
    source, model = network(0), network(1)
    path = save_safetensors(source, tmp_path / "model.safetensors", metadata={"licence": "MIT"})
    assert safetensors.torch.load_model(model, path) == (set(), [])
    assert same(model, source)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "licence": "MIT"}


def test_we_read_what_safetensors_itself_writes(tmp_path: Path):
    source, model = network(0), network(1)
    safetensors.torch.save_file(source.state_dict(), tmp_path / "theirs.safetensors")
    assert not load_safetensors(model, tmp_path / "theirs.safetensors")
    assert same(model, source)


def test_tied_weights_are_written_once_and_none_of_their_names_is_missed(tmp_path: Path):
    source = Tied(0)
    for path in (tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"):
        if path.name.startswith("ours"):
            save_safetensors(source, path)
        else:
            safetensors.torch.save_model(source, str(path))
        assert list(safetensors.torch.load_file(path)) == ["embedding.weight"]
        model = Tied(1)
        assert not load_safetensors(model, path)
        assert same(model, source)
        assert model.output.weight is model.embedding.weight
    other = Tied(2)
    assert safetensors.torch.load_model(other, tmp_path / "ours.safetensors") == (set(), [])
    assert same(other, source)


def test_non_contiguous_weights_are_written(tmp_path: Path):
    source, model = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    source.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2).T)
    load_safetensors(model, save_safetensors(source, tmp_path / "m.safetensors"))
    assert model.weight.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


def test_parts_and_what_does_not_fit_are_as_for_checkpoints(tmp_path: Path):
    source = network(0)
    path = save_safetensors(source, tmp_path / "m.safetensors")
    part = nn.Linear(2, 3)
    load_safetensors(part, path, prefix="body.")
    assert same(part, source["body"])
    with pytest.raises(CheckpointError, match=r"shape: body\.weight is \(3, 2\) in the checkpoint, \(4, 2\) in the"):
        load_safetensors(network(1, width=4), path)
    assert load_safetensors(nn.ModuleDict({"body": nn.Linear(2, 3)}), path, strict=False).unexpected.keys() == {
        name for name in source.state_dict() if not name.startswith("body.")
    }


def test_a_failed_write_leaves_the_older_file_and_no_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = save_safetensors(network(0), tmp_path / "m.safetensors")
    content = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_safetensors(network(1), path)
    monkeypatch.undo()
    assert [(file, file.read_bytes()) for file in tmp_path.iterdir()] == [(path, content)]
    with pytest.raises(OSError, match="cannot be written"):
        save_safetensors(network(1), tmp_path / "nowhere" / "m.safetensors")


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(4)
        self.register_buffer("first", both[:3])
        self.register_buffer("second", both[1:])


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return {"no": "tensor"}


@pytest.mark.parametrize("model", [Overlapping(), Extra()], ids=lambda model: type(model).__name__)
def test_what_safetensors_cannot_hold_is_refused(model: nn.Module, tmp_path: Path):
    with pytest.raises(CheckpointError, match="safetensors cannot hold these weights"):
        save_safetensors(model, tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_missing_or_none_of_safetensors_is_a_checkpoint_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_safetensors(nn.Linear(1, 1), tmp_path / "missing.safetensors")
    path = save_safetensors(nn.Linear(2, 2), tmp_path / "m.safetensors")
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
            load_safetensors(nn.Linear(2, 2), path)


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def absent(name: str, *arguments: Any) -> Any:
        if name == "safetensors":
            raise ImportError("No module named 'safetensors'")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigurationError, match=r"pip install 'pulsetrain\[safetensors\]'"):
        save_safetensors(nn.Linear(1, 1), tmp_path / "m.safetensors")


def test_a_url_is_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"save_safetensors\(path='memory://m'\): only files of this machine"):
        save_safetensors(nn.Linear(1, 1), "memory://m")


@pytest.mark.parametrize("name", ["best", "latest", "000000003-checkpoint"])
def test_a_file_in_a_checkpoint_is_refused_with_the_checkpoints_name(name: str, tmp_path: Path):
    CheckpointManager(tmp_path).save({"model": nn.Linear(2, 1).state_dict()}, step=3, is_best=True)
    with pytest.raises(CheckpointError, match=rf"a checkpoint is a folder; name {tmp_path}/{name}, without 'state.pt'"):
        load_weights(nn.Linear(2, 1), tmp_path / name / "state.pt")


@pytest.mark.parametrize("name", ["best", "latest"])
def test_best_and_latest_without_a_run_are_refused_with_the_form_of_the_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"name the run folder, too, as RUN/checkpoints/{name}"):
        load_weights(nn.Linear(2, 1), name)
