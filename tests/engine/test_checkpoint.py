"""Checkpoints on disk: whole or absent, checked when read, pruned after the new one is durable."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from engine.checkpoint import CheckpointManager
from engine.errors import CheckpointError, RunFolderError

STATE = {"weights": torch.arange(5.0), "step": 3, "nested": {"rates": [0.1, float("inf")]}}


def names(manager: CheckpointManager) -> list[str]:
    return [path.name for path in manager.valid()]


def test_what_is_saved_is_what_is_loaded(tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    loaded = manager.load(manager.save(STATE, "first"))
    assert torch.equal(loaded.pop("weights"), STATE["weights"])
    assert loaded == {"step": 3, "nested": {"rates": [0.1, float("inf")]}}


def test_a_name_used_again_makes_a_new_folder(tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    paths = [manager.save(STATE, "same", step=7) for _ in range(3)]
    assert [path.name for path in paths] == ["000000007-same", "000000007-same~2", "000000007-same~3"]
    assert manager.get_latest() == paths[-1]


def test_the_last_ones_and_the_best_stay(tmp_path: Path):
    manager = CheckpointManager(tmp_path, keep_last_n=2)
    for step in range(6):
        manager.save(STATE, "c", is_best=step == 1, step=step)
    assert names(manager) == ["000000001-c", "000000004-c", "000000005-c"]
    assert manager.get_best() == tmp_path / "000000001-c"


def test_without_a_step_the_next_number_is_taken(tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    assert [manager.save(STATE).name for _ in range(2)] == ["000000000-checkpoint", "000000001-checkpoint"]


def test_an_empty_folder_has_neither_a_latest_nor_a_best(tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    assert (manager.get_latest(), manager.get_best(), manager.valid()) == (None, None, [])


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_cut_file_is_refused_and_passed_over(cut: int, tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    older, newer = manager.save(STATE), manager.save(STATE)
    content = (newer / "state.pt").read_bytes()
    (newer / "state.pt").write_bytes(content[:cut])
    with pytest.raises(CheckpointError, match="cut or damaged"):
        manager.load(newer)
    assert manager.get_latest() == older


def test_every_kind_of_flipped_byte_is_noticed(tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    path = manager.save(STATE)
    for file in (path / "state.pt", path / "manifest.json"):
        content = file.read_bytes()
        for position in range(0, len(content), 41):
            damaged = bytearray(content)
            damaged[position] ^= 0x10
            file.write_bytes(damaged)
            if file.name == "manifest.json" and _same_promise(damaged, content):
                continue  # a label changed, not what the checkpoint is
            with pytest.raises(CheckpointError):
                manager.load(path)
        file.write_bytes(content)
    manager.load(path)


def _same_promise(damaged: bytes, content: bytes) -> bool:
    try:
        mine, theirs = json.loads(damaged), json.loads(content)
    except ValueError:
        return False
    return (mine.get("format"), mine.get("files")) == (theirs["format"], theirs["files"])


def test_a_failed_save_leaves_the_older_ones_and_no_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    manager = CheckpointManager(tmp_path, keep_last_n=1)
    older = manager.save(STATE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        manager.save(STATE)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [older.name]
    manager.load(older)


def test_what_a_crash_left_half_written_is_removed_at_the_next_start(tmp_path: Path):
    good = CheckpointManager(tmp_path).save(STATE)
    (tmp_path / ".partial-000000009-x").mkdir()
    (tmp_path / ".partial-000000009-x" / "state.pt").write_bytes(b"half")
    manager = CheckpointManager(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]
    assert manager.get_latest() == good


def test_no_code_is_run_by_loading(tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch " + str(tmp_path / "ran"),)

    manager = CheckpointManager(tmp_path / "c")
    path = manager.save({"x": Evil()})
    with pytest.raises(Exception, match=r"[Ww]eights"):
        manager.load(path)
    assert not (tmp_path / "ran").exists()


def test_a_newer_format_says_so(tmp_path: Path):
    path = CheckpointManager(tmp_path).save(STATE)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="update pulsetrain"):
        CheckpointManager(tmp_path).load(path)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b"])
def test_a_name_that_is_no_folder_name_is_refused(name: str, tmp_path: Path):
    with pytest.raises(ValueError, match="letters"):
        CheckpointManager(tmp_path).save(STATE, name)


def test_bad_arguments_are_refused_at_once(tmp_path: Path):
    with pytest.raises(ValueError, match="at least 1"):
        CheckpointManager(tmp_path, keep_last_n=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be used"):
        CheckpointManager(tmp_path / "file" / "checkpoints")
