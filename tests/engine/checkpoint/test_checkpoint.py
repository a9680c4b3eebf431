"""Checkpoints on disk: complete or absent, checked when read, pruned after the new one is durable."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from pulsetrain.engine.checkpoint import CheckpointManager, choice, find_checkpoints
from pulsetrain.engine.checkpoint.reader import damage_of
from pulsetrain.engine.errors import CheckpointError, ConfigurationError, RunFolderError
from tests.support.checkpoints import STATE, relabel
from tests.support.largest_file import largest_file


def names(manager: CheckpointManager) -> list[str]:
    return [path.name for path in manager.valid()]


def test_a_checkpoint_is_loaded_as_it_was_saved(tmp_path: Path):
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


def half_written(folder: Path) -> Path:
    partial = folder / ".partial-000000009-x"
    partial.mkdir()
    (partial / "state.pt").write_bytes(b"half")
    return partial


def test_what_a_crash_left_half_written_is_removed_before_the_first_save(tmp_path: Path):
    good = CheckpointManager(tmp_path).save(STATE)
    half_written(tmp_path)
    (tmp_path / ".partial-best").write_text("half")
    manager = CheckpointManager(tmp_path)
    assert manager.get_latest() == good
    new = manager.save(STATE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [good.name, new.name]


def test_a_reader_removes_nothing_of_what_a_writer_is_just_writing(tmp_path: Path):
    writer = CheckpointManager(tmp_path)
    good = writer.save(STATE, is_best=True)
    under_way = half_written(tmp_path)
    reader = CheckpointManager(tmp_path)
    assert [reader.get_latest(), reader.get_best(), *reader.valid()] == [good] * 3
    reader.load(good)
    assert (under_way / "state.pt").read_bytes() == b"half"
    writer.clean()
    assert not under_way.exists()


def test_a_reader_that_a_writer_overtakes_finds_what_the_writer_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    writer = CheckpointManager(tmp_path, keep_last_n=1)
    writer.save(STATE)
    newer: list[Path] = []

    def overtaken(folder: Path) -> str | None:
        if not newer:  # after the reader listed the folder, before it opens the checkpoint
            newer.append(writer.save(STATE))
        return damage_of(folder)

    monkeypatch.setattr(choice, "damage_of", overtaken)
    with structlog.testing.capture_logs() as logs:
        assert CheckpointManager(tmp_path).get_latest() == newer[0]
    assert logs == []


def test_it_is_announced_when_it_is_there_and_the_older_ones_still_are(tmp_path: Path):
    manager = CheckpointManager(tmp_path, keep_last_n=1)
    older = manager.save(STATE, is_best=True)
    seen: list[tuple[Any, ...]] = []

    def look(path: Path) -> None:
        seen.append((path, manager.get_latest(), manager.get_best(), manager.valid()))

    newer = manager.save(STATE, is_best=True, announce=look)
    assert seen == [(newer, newer, newer, [older, newer])]
    assert manager.valid() == [newer]


def test_where_the_announcement_fails_nothing_is_deleted(tmp_path: Path):
    manager = CheckpointManager(tmp_path, keep_last_n=1)
    older = manager.save(STATE)

    def fail(path: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        manager.save(STATE, announce=fail)
    assert manager.valid() == [older, manager.get_latest()]


def test_a_failed_deletion_of_an_old_checkpoint_is_only_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    manager = CheckpointManager(tmp_path, keep_last_n=1)
    older = manager.save(STATE)
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source == older:
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with structlog.testing.capture_logs() as logs:
        newer = manager.save(STATE)
    assert manager.valid() == [older, newer]
    assert [line["event"] for line in logs] == ["older checkpoints not deleted"]
    monkeypatch.undo()
    assert [manager.save(STATE)] == manager.valid()


def test_a_damaged_note_of_the_best_is_an_error_and_nothing_is_deleted_while_it_is(tmp_path: Path):
    manager = CheckpointManager(tmp_path, keep_last_n=1)
    best = manager.save(STATE, is_best=True)
    note = tmp_path / "best"
    content = note.read_bytes()
    for position in range(len(content)):
        note.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(CheckpointError, match="best: damaged"):
            manager.get_best()
    with structlog.testing.capture_logs() as logs:
        newer = manager.save(STATE)
    assert manager.valid() == [best, newer]
    assert [line["event"] for line in logs] == ["older checkpoints not deleted"]
    assert [manager.save(STATE, is_best=True)] == manager.valid() == [manager.get_best()]


def test_a_disk_that_fills_inside_a_tensor_is_an_os_error_too(tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    older = manager.save(STATE)
    with largest_file(100_000), pytest.raises(OSError, match="too large"):
        manager.save({"weights": torch.ones(1_000_000)})
    assert [path.name for path in tmp_path.iterdir()] == [older.name]


def test_the_order_is_that_of_writing_whatever_the_steps(tmp_path: Path):
    manager = CheckpointManager(tmp_path, keep_last_n=9)
    steps = [20, 50, 60, 30, 50, 40]  # resumed after step 20, twice
    paths = [manager.save(STATE, "c", step=step) for step in steps]
    assert manager.valid() == paths
    assert manager.get_latest() == paths[-1]
    assert [json.loads((path / "manifest.json").read_text())["ordinal"] for path in paths] == [1, 2, 3, 4, 5, 6]


def test_checkpoints_of_an_abandoned_branch_are_pruned_before_new_ones(tmp_path: Path):
    manager = CheckpointManager(tmp_path, keep_last_n=2)
    for step in (20, 50, 60, 30, 40):
        newest = manager.save(STATE, "c", step=step)
        assert manager.get_latest() == newest
    assert names(manager) == ["000000030-c~4", "000000040-c~5"]


def test_checkpoints_written_before_there_were_ordinals_count_by_step(tmp_path: Path):
    manager = CheckpointManager(tmp_path, keep_last_n=9)
    old = [manager.save(STATE, "c", step=step) for step in (60, 5, 20)]
    for path in old:
        relabel(path, ordinal=None)
    assert manager.valid() == [old[1], old[2], old[0]]
    new = manager.save(STATE, "c", step=30)
    assert manager.get_latest() == new
    assert json.loads((new / "manifest.json").read_text())["ordinal"] == 61


def test_a_checkpoint_with_an_unreadable_manifest_ranks_last_and_is_reported_as_skipped(tmp_path: Path):
    manager = CheckpointManager(tmp_path, keep_last_n=9)
    paths = [manager.save(STATE, "c", step=step) for step in (10, 90, 20, 30)]
    (paths[1] / "manifest.json").write_text("{")
    (paths[2] / "manifest.json").unlink()
    assert find_checkpoints(tmp_path) == [paths[2], paths[1], paths[0], paths[3]]
    with structlog.testing.capture_logs() as logs:
        assert manager.get_latest() == paths[3]
    assert [Path(line["reason"].split(":")[0]).relative_to(tmp_path).parts[0] for line in logs] == [
        "000000090-c",
        "000000020-c~3",
    ]


def test_an_ordinal_that_is_not_an_integer_is_damage(tmp_path: Path):
    path = CheckpointManager(tmp_path).save(STATE)
    relabel(path, ordinal="7")
    with pytest.raises(CheckpointError, match="its ordinal is '7'"):
        CheckpointManager(tmp_path).load(path)


def test_the_target_is_the_folder_that_the_next_save_makes(tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    for _ in range(3):
        target = manager.target("c", 4)
        assert manager.save(STATE, "c", step=4) == target


def test_all_damaged_is_an_error_and_no_fresh_start(tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    for path in [manager.save(STATE) for _ in range(2)]:
        (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="every checkpoint there is damaged"):
        manager.get_latest()
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        manager.load(path)


@pytest.mark.parametrize("name", ["/dev/zero", "../state.pt", "..", "", "a/b"])
def test_a_manifest_that_points_out_of_its_folder_is_refused(name: str, tmp_path: Path):
    path = CheckpointManager(tmp_path).save(STATE)
    entry = {"bytes": 0, "sha256": ""}
    relabel(path, files={"state.pt": entry, name: entry})
    with pytest.raises(CheckpointError, match="names one that cannot be in its folder"):
        CheckpointManager(tmp_path).load(path)


def test_a_newer_format_says_so(tmp_path: Path):
    path = CheckpointManager(tmp_path).save(STATE)
    relabel(path, format=99)
    with pytest.raises(CheckpointError, match="update pulsetrain"):
        CheckpointManager(tmp_path).load(path)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b"])
def test_an_invalid_folder_name_is_refused(name: str, tmp_path: Path):
    with pytest.raises(ConfigurationError, match="letters"):
        CheckpointManager(tmp_path).save(STATE, name)


def test_bad_arguments_are_refused_at_once(tmp_path: Path):
    for number in (0, 1.5, True):
        with pytest.raises(ConfigurationError, match=r"CheckpointManager\(keep_last_n=.*at least 1"):
            CheckpointManager(tmp_path, keep_last_n=number)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be used"):
        CheckpointManager(tmp_path / "file" / "checkpoints")


@pytest.mark.parametrize("name", ["best", "latest", "run"])
def test_a_run_folder_may_have_the_name_of_a_pointer(name: str, tmp_path: Path):
    other = CheckpointManager(tmp_path / "checkpoints")  # those that `best` and `latest` in tmp_path would name
    other.save({"of": "another run"}, is_best=True)
    manager = CheckpointManager(tmp_path / name / "checkpoints")
    first, last = (manager.save({"epoch": epoch}, is_best=epoch == 1) for epoch in (1, 2))
    for folder in (tmp_path / name, manager.checkpoint_dir):
        assert choice.resolve(folder) == choice.resolve(folder / "latest") == last
        assert choice.resolve(folder / "best") == first
    assert choice.load_checkpoint(tmp_path / name) == {"epoch": 2}
