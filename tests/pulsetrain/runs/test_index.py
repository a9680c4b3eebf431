"""The runs below a folder: which are found, and which are read again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.runs import index as index_module
from pulsetrain.runs.archive import write_archive
from pulsetrain.runs.index import INDEX, RunIndex
from pulsetrain.runs.summary import RunSummary, summarize
from pulsetrain.runs.tags import change_tags
from tests.support.run_folders import write_run


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that are read."""
    names: list[str] = []

    def noting(folder: Path) -> RunSummary:
        names.append(folder.name)
        return summarize(folder)

    monkeypatch.setattr(index_module, "summarize", noting)
    return names


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "a", [1.0])
    write_run(tmp_path / "deep" / "er" / "b", [0.5])
    (tmp_path / "deep" / "notes").mkdir()
    (tmp_path / "a" / "checkpoints" / "000000001-x").mkdir(parents=True)
    return tmp_path


def names(root: Path) -> list[str]:
    return [each.name for each in RunIndex(root).summaries()]


def test_runs_are_found_in_subfolders_and_read_once(root: Path, read: list[str]):
    assert names(root) == ["a", "b"]
    assert sorted(read) == ["a", "b"]
    first = RunIndex(root, cache=False).summaries()
    read.clear()
    assert RunIndex(root).summaries() == first
    assert read == []


def test_known_runs_are_not_read_again_where_the_folder_is_written_differently(
    root: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
):
    log = write_run(root / "c", [1.0] * 400) / "events" / "events.jsonl.zst"
    content = log.read_bytes()
    log.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    names(root)
    read.clear()
    for place, folder in ((root.parent, Path(root.name)), (root, Path()), (root / "a", Path(".."))):
        monkeypatch.chdir(place)
        found = RunIndex(folder).summaries()
        assert read == ["c"]  # whose reason names it
        assert [each.folder for each in found] == [folder / each for each in ("a", "c", "deep/er/b")]
        assert found == RunIndex(folder, cache=False).summaries()
        read.clear()


def test_a_run_that_has_changed_is_read_again(root: Path, read: list[str]):
    names(root)
    read.clear()
    change_tags(root / "a", added=["good"])
    assert [each.tags for each in RunIndex(root).summaries()] == [("good",), ()]
    assert read == ["a"]


def test_a_run_that_is_not_settled_is_read_each_time(root: Path, read: list[str]):
    folder = write_run(root / "c", [1.0], None, closed=False)
    facts = f'{{"pid": {os.getpid()}, "processes": ""}}'
    (folder / ".owner").write_text(facts)
    names(root)
    read.clear()
    assert names(root) == ["a", "c", "b"]
    assert read == ["c"]


def test_runs_that_are_gone_are_forgotten(root: Path, read: list[str]):
    names(root)
    shutil.rmtree(root / "a")
    assert names(root) == ["b"]
    write_run(root / "a", [2.0])
    assert [each.best["val/loss"] for each in RunIndex(root).summaries()] == [2.0, 0.5]


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "events/events.jsonl.zst"])
def test_a_run_of_which_a_file_could_not_be_read_is_read_again(name: str, root: Path, monkeypatch: pytest.MonkeyPatch):
    before = RunIndex(root, cache=False).summaries()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", _failing(root / "a" / name))
        first, _ = RunIndex(root).summaries()
    assert first.unread
    assert "cannot be read" in first.reason
    assert RunIndex(root).summaries() == before


def _failing(path: Path) -> Callable[..., int]:
    """os.open, which fails for this file."""
    real = os.open

    def opened(name: str | Path, *args: Any) -> int:
        if str(name) == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(name))
        return real(name, *args)

    return opened


@pytest.mark.parametrize("content", [b"", b"nonsense" * 100])
def test_a_damaged_database_is_made_again(content: bytes, root: Path, read: list[str]):
    names(root)
    (root / INDEX).write_bytes(content)
    assert names(root) == ["a", "b"]
    read.clear()
    names(root)
    assert read == []


def test_a_database_of_another_version_is_made_again(root: Path, read: list[str], monkeypatch: pytest.MonkeyPatch):
    names(root)
    monkeypatch.setattr(index_module, "_VERSION", 99)
    read.clear()
    assert names(root) == names(root) == ["a", "b"]
    assert sorted(read) == ["a", "b"]


def test_deleting_it_costs_nothing_and_no_run_is_changed(root: Path):
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    first = RunIndex(root).summaries()
    shutil.rmtree(root / INDEX.parent)
    assert RunIndex(root).summaries() == first
    shutil.rmtree(root / INDEX.parent)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_several_commands_at_once_agree(root: Path):
    for number in range(20):
        write_run(root / f"more-{number:02}", [1.0])
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(names(root))) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 6
    assert all(each == found[0] and len(each) == 22 for each in found)


def test_many_runs_are_read_by_several_processes_in_the_same_order(root: Path, monkeypatch: pytest.MonkeyPatch):
    alone = RunIndex(root, cache=False).summaries()
    monkeypatch.setattr(index_module, "_MANY", 1)
    assert RunIndex(root, cache=False).summaries() == alone


def test_where_other_threads_run_no_process_is_forked(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index_module, "_MANY", 1)
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", lambda *words: pytest.fail("processes are started"))
    monkeypatch.setattr(index_module.os, "fork", lambda: pytest.fail("a process is started"))
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        assert names(root) == ["a", "b"]
        assert names(root) == ["a", "b"]  # from the index
    finally:
        end.set()
        other.join()


def many(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Runs that two processes examine."""
    monkeypatch.setattr(index_module, "_MANY", 1)
    monkeypatch.setattr(index_module, "_RECENT", 0)
    monkeypatch.setattr(index_module, "_may_fork", lambda: True)  # also where earlier tests have left a thread
    folders = [write_run(root / f"run-{number}", [1.0]) for number in range(6)]
    assert names(root) == [each.name for each in folders]
    assert unchanged(root) == folders
    return folders


def unchanged(root: Path) -> list[Path]:
    return sorted(map(Path, index_module._unchanged(RunIndex(root)._known())))


def test_two_processes_that_examine_many_runs_see_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = many(tmp_path, monkeypatch)
    for each in (folders[0], folders[5]):
        change_tags(each, added=["new"])
    shutil.rmtree(folders[4])
    assert unchanged(tmp_path) == folders[1:4]
    found = {each.name: each.tags for each in RunIndex(tmp_path).summaries()}
    assert found == {"run-0": ("new",), "run-1": (), "run-2": (), "run-3": (), "run-5": ("new",)}


def test_runs_that_a_killed_process_was_to_examine_are_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = many(tmp_path, monkeypatch)
    monkeypatch.setattr(index_module.os, "write", lambda file, data: os.kill(os.getpid(), signal.SIGKILL))
    assert 0 < len(unchanged(tmp_path)) < 6
    assert names(tmp_path) == [each.name for each in folders]


def test_where_no_process_can_be_started_the_runs_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    folders = many(tmp_path, monkeypatch)
    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", refuse)
    assert unchanged(tmp_path) == folders
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert [each.name for each in RunIndex(tmp_path, cache=False).summaries()] == [each.name for each in folders]


def test_ctrl_c_leaves_no_process_and_no_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    many(tmp_path, monkeypatch)
    parent, forked, fork = os.getpid(), list[int](), os.fork

    def interrupt(known: object, folder: str) -> bool:
        if os.getpid() == parent:
            raise KeyboardInterrupt
        return True

    def noted() -> int:
        forked.append(fork())
        return forked[-1]

    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", noted)
    monkeypatch.setattr(index_module._Known, "is_unchanged", interrupt)
    with pytest.raises(KeyboardInterrupt):
        unchanged(tmp_path)
    assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChildProcessError):  # it was waited for
        os.waitpid(forked[0], os.WNOHANG)


def test_runs_are_listed_although_a_process_that_reads_them_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = many(tmp_path, monkeypatch)
    parent = os.getpid()

    def killed(folder: Path) -> RunSummary:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return summarize(folder)

    monkeypatch.setattr(index_module, "summarize", killed)
    assert [each.name for each in RunIndex(tmp_path, cache=False).summaries()] == [each.name for each in folders]


def test_an_index_in_a_folder_that_may_not_be_read_is_not_used(root: Path, monkeypatch: pytest.MonkeyPatch):
    names(root)
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if str(path) == str(root / INDEX):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert names(root) == ["a", "b"]


@pytest.mark.parametrize("name", ["samples", "plots", "traces", "checkpoints"])
def test_a_folder_of_runs_may_have_the_name_of_a_folder_in_a_run(name: str, root: Path):
    write_run(root / "a" / name / "inside", [1.0])
    write_run(root / name / "outside", [1.0])
    write_run(root / "other" / "crash" / "bundle", [1.0])
    assert sorted(names(root)) == ["a", "b", "outside"]


def test_a_run_is_its_own_root(root: Path):
    assert names(root / "a") == ["a"]
    assert not (root / "a" / INDEX.parent).exists()


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_root_that_is_not_a_folder_is_refused(name: str, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match=f"{name}: (does not exist|is a file); name a folder"):
        RunIndex(tmp_path / name)


def test_archives_are_listed_where_they_are_asked_for(tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5], "terminate", reason="early stopping: enough")
    change_tags(tmp_path / "a", ["good"])
    write_archive(tmp_path / "a", tmp_path / "a.run.zip")
    (tmp_path / "b.run.zip").write_text("damaged")
    shutil.rmtree(tmp_path / "a")
    for _ in range(2):  # read, and remembered
        found, damaged = RunIndex(tmp_path).summaries(archives=True)
        assert (found.name, found.status, found.reason) == ("a.run.zip", "archived", "stopped: early stopping: enough")
        assert (found.iteration, found.best["val/loss"], found.tags) == (10, 0.5, ("good",))
        assert (damaged.status, damaged.reason) == ("archived", "is not a run's archive, or is damaged")
        assert RunIndex(tmp_path).summaries() == []
    shutil.copy(tmp_path / "a.run.zip", tmp_path / "b.run.zip")
    assert [each.iteration for each in RunIndex(tmp_path).summaries(archives=True)] == [10, 10]
    (tmp_path / "a.run.zip").unlink()
    assert len(RunIndex(tmp_path).summaries(archives=True)) == 1


@pytest.fixture
def settled(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Known runs whose folders were changed long ago."""
    monkeypatch.setattr(index_module, "_RECENT", 0)
    assert names(root) == ["a", "b"]
    return root


@pytest.fixture
def looked_through(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the folders that are looked through."""
    found: list[str] = []
    scandir = os.scandir

    def noting(folder: str) -> Any:
        found.append(os.path.basename(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", noting)
    return found


def test_the_folder_of_a_known_run_is_not_looked_through_again(settled: Path, looked_through: list[str]):
    assert names(settled) == ["a", "b"]
    assert {"a", "b"}.isdisjoint(looked_through)
    assert "er" in looked_through


def test_a_folder_that_was_changed_just_now_is_looked_through_again(root: Path, looked_through: list[str]):
    names(root)
    looked_through.clear()
    names(root)
    assert {"a", "b"} <= set(looked_through)  # it may have been changed again within the same time stamp


def test_a_known_folder_that_has_settled_meanwhile_is_not_looked_through_for_long(
    root: Path, looked_through: list[str], monkeypatch: pytest.MonkeyPatch
):
    names(root)
    monkeypatch.setattr(index_module, "_RECENT", 0)
    names(root)
    looked_through.clear()
    assert names(root) == ["a", "b"]
    assert {"a", "b"}.isdisjoint(looked_through)


def test_a_log_that_is_continued_is_read_again(settled: Path, read: list[str]):
    read.clear()
    writer = LogWriter(settled / "a" / "events")
    writer.add(LoggedEvent(engine="trainer", event="iteration_completed", iteration=77, seq=10**6))
    writer.close()
    assert RunIndex(settled).summaries()[0].iteration == 77
    assert read == ["a"]


def test_a_file_that_is_written_in_place_and_keeps_its_size_and_time_is_read_again(settled: Path, read: list[str]):
    read.clear()
    config = settled / "a" / "config.yaml"
    before = config.stat()
    config.write_text(config.read_text().replace("0.1", "0.2"))
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert RunIndex(settled).summaries()[0].settings["training.learning_rate"] == 0.2
    assert read == ["a"]


def move(source: Path, target: Path) -> None:
    for each in source.iterdir():
        each.rename(target / each.name)


def test_a_log_that_comes_later_is_found(root: Path, tmp_path_factory: pytest.TempPathFactory, settled: Path):
    """The time stamp of the run folder does not change."""
    away = tmp_path_factory.mktemp("away")
    move(root / "a" / "events", away)
    assert RunIndex(root).summaries()[0].epoch == 0
    assert RunIndex(root).summaries()[0].epoch == 0
    move(away, root / "a" / "events")
    assert RunIndex(root).summaries()[0].epoch == 1


def test_the_log_of_another_rank_that_comes_later_is_counted(settled: Path):
    LogWriter(settled / "a" / "events", rank=1).close()
    assert RunIndex(settled).summaries()[0].ranks == 2


def test_a_link_whose_target_comes_later_is_followed(
    root: Path, tmp_path_factory: pytest.TempPathFactory, settled: Path
):
    target = tmp_path_factory.mktemp("away") / "config.yaml"
    config = root / "a" / "config.yaml"
    text = config.read_text()
    config.unlink()
    config.symlink_to(target)
    for _ in range(2):
        assert "model" not in RunIndex(root).summaries()[0].settings
    target.write_text(text)
    assert RunIndex(root).summaries()[0].settings["model"] == "Net"


def test_the_mode_of_a_settled_folder_is_noticed(settled: Path, looked_through: list[str]):
    (settled / "a").chmod(0o711)
    assert names(settled) == ["a", "b"]
    assert "a" in looked_through


def test_a_run_inside_of_a_settled_one_is_found(settled: Path):
    write_run(settled / "a" / "inner", [0.25])
    for _ in range(2):
        assert names(settled) == ["a", "inner", "b"]
    write_run(settled / "a" / "inner" / "most", [0.25])
    assert names(settled) == ["a", "inner", "most", "b"]


def test_an_archive_inside_of_a_settled_run_is_found(settled: Path):
    (settled / "a" / "later.run.zip").symlink_to(settled / "kept")
    for _ in range(2):
        assert [each.name for each in RunIndex(settled).summaries(archives=True)] == ["a", "b"]
    write_archive(settled / "deep" / "er" / "b", settled / "b.run.zip")
    (settled / "b.run.zip").rename(settled / "kept")
    assert [each.name for each in RunIndex(settled).summaries(archives=True)] == ["a", "later.run.zip", "b"]


def test_a_settled_run_that_is_removed_is_gone(settled: Path):
    shutil.rmtree(settled / "a")
    assert names(settled) == ["b"]


def test_the_changes_of_a_fork_stay_a_list(root: Path):
    parent = {"run": "runs/a", "iteration": 5, "changed": ["training.seed: 1 -> 2", "a: 3 -> 4"]}
    write_run(root / "c", [1.0], parent=parent)
    for _ in range(2):  # the second time, they are remembered
        assert RunIndex(root).summaries()[1].parent == parent


@pytest.mark.parametrize("where", ["settings", "parent", "list"])
def test_a_number_of_more_than_64_bits_is_listed(root: Path, where: str):
    parents = {"parent": {"run": "runs/a", "iteration": 10**25}, "list": {"run": "runs/a", "changed": [10**25]}}
    run = write_run(root / "c", [1.0], parent=parents.get(where))
    if where == "settings":
        (run / "config.yaml").write_text(f"seed: {10**25}")
    for _ in range(2):
        assert names(root) == ["a", "c", "b"]
    found = RunIndex(root).summaries()[1]
    parent = found.parent or {}
    assert str(10**25) in (found.settings.get("seed"), parent.get("iteration"), *(parent.get("changed") or ()))


def test_numbers_of_any_size_in_a_description_or_a_log_hide_no_run(root: Path):
    run = write_run(root / "c", [1.0])
    (run / "run.json").write_text(json.dumps({"format": 1, "settings": {"max_epochs": 10**25}}))
    for name, epoch in (("epoch", 10**25), ("metric", 1)):
        writer = LogWriter(root / name / "events")
        payload = {"metrics": {"val/loss": 10**18, "val/other": 0.5}}
        writer.add(LoggedEvent(0, "trainer", "validation_completed", epoch=epoch, payload=payload, seq=0, t=1))
        writer.close()
    tail = root / "metric" / "events" / "tail.jsonl"
    tail.write_bytes(tail.read_bytes().replace(b"1000000000000000000", b"1" + b"0" * 400))
    found = {each.name: each for each in RunIndex(root).summaries()}
    assert found.keys() == {"a", "b", "c", "epoch", "metric"}
    assert found["c"].total_epochs == 4
    assert "val/loss" not in found["metric"].last
    assert "cannot be read: OverflowError" in found["epoch"].reason


def test_why_a_run_stopped_is_known_although_its_description_is_damaged(tmp_path: Path):
    folder = write_run(tmp_path / "c", [1.0], "terminate", reason="enough")
    (folder / "run.json").write_text("{")
    assert summarize(folder).reason == "enough; run.json cannot be read"
