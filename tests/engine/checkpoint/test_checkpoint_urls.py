"""Checkpoints at URLs: writing the manifest last commits them; a save may be interrupted at every step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import structlog
import torch
from fsspec.implementations.memory import MemoryFileSystem

from pulsetrain.engine.checkpoint import (
    CheckpointManager,
    CheckpointUrl,
    Form,
    check_checkpoint,
    find_checkpoints,
    load_checkpoint,
    load_weights,
)
from pulsetrain.engine.errors import CheckpointError, ConfigurationError

STATE = {"weights": torch.arange(5.0), "step": 3}


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointUrl]:
    """A folder that fsspec reaches; on the disk too, as it would be on another machine's."""
    if request.param == "file":
        yield CheckpointUrl(f"file://{tmp_path}/checkpoints")
        return
    yield CheckpointUrl("memory://runs/a/checkpoints")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def files(url: CheckpointUrl) -> Any:
    """fsspec's own view of the store, and the path of the URL there."""
    return fsspec.core.url_to_fs(url)


def everything(url: CheckpointUrl) -> list[str]:
    store, path = files(url)
    return sorted(name.removeprefix(path).strip("/") for name in store.find(path))


def damage(url: CheckpointUrl, file: str) -> None:
    store, path = files(url / file)
    content = bytearray(store.cat_file(path))
    content[len(content) // 2] ^= 1
    store.pipe_file(path, bytes(content))


@pytest.mark.parametrize(("form", "file"), [("torch", "state.pt"), ("safetensors", "state.safetensors")])
def test_a_checkpoint_is_loaded_as_it_was_saved(url: CheckpointUrl, form: Form, file: str):
    manager = CheckpointManager(url)
    path = manager.save(STATE, "first", step=4, form=form)
    assert path == f"{url}/000000004-first"
    loaded = load_checkpoint(path)
    assert torch.equal(loaded.pop("weights"), STATE["weights"])
    assert loaded == {"step": 3}
    assert everything(path) == ["manifest.json", file]
    assert manager.size(path) == sum(files(path)[0].sizes([files(path / name)[1] for name in everything(path)]))


def test_a_path_is_a_string_with_a_name_a_parent_and_a_slash():
    path = CheckpointUrl("s3://bucket/runs/a")
    assert isinstance(path, str)
    assert (path.name, path.parent, path.parent.name) == ("a", "s3://bucket/runs", "runs")
    assert path / "b" == "s3://bucket/runs/a/b"
    assert [type(each) for each in (path.parent, path / "b")] == [CheckpointUrl] * 2


def test_the_last_ones_and_the_best_stay(url: CheckpointUrl):
    manager = CheckpointManager(url, keep_last_n=2)
    for step in range(6):
        manager.save(STATE, "c", is_best=step == 1, step=step)
    kept = [url / name for name in ("000000001-c", "000000004-c", "000000005-c")]
    assert manager.valid() == find_checkpoints(url) == kept
    assert (manager.get_best(), manager.get_latest()) == (kept[0], kept[-1])
    assert manager.save(STATE, "c", step=5).name == "000000005-c~2"


def test_an_empty_location_has_neither_a_latest_nor_a_best(url: CheckpointUrl):
    manager = CheckpointManager(url)
    assert (manager.get_latest(), manager.get_best(), manager.valid()) == (None, None, [])


@pytest.mark.parametrize("file", ["state.pt", "manifest.json"])
def test_damaged_checkpoints_are_noticed_and_skipped(file: str, url: CheckpointUrl):
    manager = CheckpointManager(url)
    older, newer = manager.save(STATE), manager.save(STATE)
    damage(newer, file)
    with pytest.raises(CheckpointError):
        check_checkpoint(newer)
    with structlog.testing.capture_logs() as logs:
        assert manager.get_latest() == older
    assert [line["event"] for line in logs] == ["damaged checkpoint skipped"]


class Cut(Exception):  # noqa: N818
    """The machine is gone."""


def cut_after(calls: int, store: type, patch: pytest.MonkeyPatch) -> None:
    """From then on no call changes the store any more, not even to tidy up."""
    left = iter(range(calls))

    def limit(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise Cut
            return real(*arguments, **options)

        return call

    for name in ("makedirs", "_open", "pipe_file", "rm", "rm_file"):
        patch.setattr(store, name, limit(getattr(store, name)))


def test_a_save_cut_before_any_of_its_calls_leaves_the_checkpoint_before_it(
    url: CheckpointUrl, monkeypatch: pytest.MonkeyPatch
):
    previous = CheckpointManager(url).save(STATE, is_best=True, step=0)
    announced: list[Any] = []
    for calls in range(40):
        with monkeypatch.context() as patch:
            cut_after(calls, type(files(url)[0]), patch)
            try:
                CheckpointManager(url, keep_last_n=99).save(STATE, is_best=True, announce=announced.append)
            except Cut:
                pass
        reader = CheckpointManager(url)
        latest, best = reader.get_latest(), reader.get_best()
        assert reader.valid() == find_checkpoints(url)
        if announced:
            assert [latest] == [best] == announced
            break
        assert latest == previous or latest.name.startswith(f"{int(previous.name[:9]) + 1:09d}")
        assert best == previous
        previous = CheckpointManager(url).save(STATE, is_best=True)
    assert announced
    assert calls >= 3  # the state, the manifest, the pointer to the best


def test_a_reader_that_comes_in_the_middle_of_a_delete_sees_no_half_checkpoint(
    url: CheckpointUrl, monkeypatch: pytest.MonkeyPatch
):
    manager = CheckpointManager(url, keep_last_n=1)
    manager.save(STATE, step=1)
    store = type(files(url)[0])
    real = store.rm
    seen: list[list[str]] = []

    def one_by_one(self: Any, path: str, recursive: bool = False) -> None:
        for file in sorted(self.find(path), reverse=True):  # state.pt before manifest.json: the order is not guaranteed
            self.rm_file(file)
            reader = CheckpointManager(url)
            assert reader.valid() == find_checkpoints(url)  # the remaining files are ignored
            seen.append([each.name for each in reader.valid()])
        real(self, path, recursive=recursive)

    monkeypatch.setattr(store, "rm", one_by_one)
    new = manager.save(STATE, step=2)
    assert seen == [[new.name]]
    assert find_checkpoints(url) == [new]


def test_without_a_manifest_it_does_not_count_and_the_first_save_removes_it(url: CheckpointUrl):
    good = CheckpointManager(url).save(STATE, step=1)
    store, half = files(url / "000000007-half" / "state.pt")
    store.makedirs(store._parent(half), exist_ok=True)
    store.pipe_file(half, b"half")
    reader = CheckpointManager(url)
    assert reader.valid() == find_checkpoints(url) == [good]
    assert reader.get_latest() == good
    assert store.exists(half)  # a reader removes nothing: a writer may be writing it
    new = CheckpointManager(url).save(STATE)
    assert not store.exists(half)
    assert find_checkpoints(url) == [good, new]
    assert new.name == "000000002-checkpoint"


def test_a_missing_checkpoint_is_reported_with_those_present(url: CheckpointUrl):
    CheckpointManager(url).save(STATE)
    with pytest.raises(CheckpointError, match=r"no checkpoint there.*present: 000000000-checkpoint"):
        load_checkpoint(url / "000000009-x")


def test_weights_are_loaded_from_there(url: CheckpointUrl):
    source, model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    load_weights(model, CheckpointManager(url).save({"model": source.state_dict()}))
    assert torch.equal(model.weight, source.weight)


def test_a_url_of_this_machines_disk_takes_the_durable_way_of_paths(tmp_path: Path):
    manager = CheckpointManager(f"file://{tmp_path}/checkpoints")
    path = manager.save(STATE, "c", step=1)
    assert path == tmp_path / "checkpoints" / "000000001-c"
    assert isinstance(path, Path)
    assert load_checkpoint(f"file://{path}")["step"] == 3


def test_an_unknown_url_scheme_is_refused_with_the_remedy():
    with pytest.raises(ConfigurationError, match="'nowhere://a': Protocol not known: nowhere"):
        CheckpointManager("nowhere://a")


def test_without_its_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it was not installed
    with pytest.raises(ConfigurationError, match=r"'s3://bucket/a': .*pip install 'pulsetrain\[s3\]'"):
        CheckpointManager("s3://bucket/a")
