"""What the server keeps of runs: when it is read again, and when it is deleted."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.runs.tags import change_tags
from pulsetrain.serve.series import StoredSeries
from pulsetrain.serve.store import Store, series_folder
from tests.pulsetrain.runs.test_summary import own
from tests.support.run_folders import write_run
from tests.support.series_store import all_read


def test_a_tag_leaves_the_curves_that_were_read(tmp_path: Path):
    write_run(tmp_path / "a", [1.0])
    changed: list[tuple[str, int]] = []
    here = threading.get_ident()  # a reader's thread says that it is done a moment after the points can be read
    store = Store(tmp_path, lambda name: changed.append((name, threading.get_ident())))
    try:
        assert isinstance(all_read(store, ["a"])["a"], StoredSeries)
        changed.clear()
        change_tags(tmp_path / "a", ["good"])
        store.refresh()
        assert ([name for name, thread in changed if thread == here], [*store.runs["a"].tags]) == (["a"], ["good"])
        assert isinstance(store.series("a"), StoredSeries)
        (tmp_path / "a" / "events" / "events.rank1.jsonl.zst").touch()
        assert store.series("a") is None  # the log of another rank is part of what is read
    finally:
        store.close()


def test_what_another_rank_writes_after_the_first_one_has_ended_is_reported(tmp_path: Path):
    write_run(tmp_path / "a", [1.0])
    write_rank_1(tmp_path / "a", range(3))
    changed: list[tuple[str, int]] = []
    here = threading.get_ident()
    store = Store(tmp_path, lambda name: changed.append((name, threading.get_ident())))
    try:
        all_read(store, ["a"])
        changed.clear()
        for first in (3, 6, 9):
            write_rank_1(tmp_path / "a", range(first, first + 3))
            store.refresh()
            assert not [name for name, thread in changed if thread == here]  # as long as it writes
        for _ in range(2):
            store.refresh()
            assert [name for name, thread in changed if thread == here] == ["a"]  # once, not with each look
    finally:
        store.close()


def write_rank_1(run: Path, seqs: Iterable[int]) -> None:
    writer = LogWriter(run / "events", 1, run=run.name)
    for seq in seqs:
        writer.add(LoggedEvent(seq, "trainer", "iteration_completed", iteration=seq, seq=seq))
    writer.close()


def test_points_of_removed_and_renamed_runs_and_of_killed_readers_are_deleted(tmp_path: Path):
    names = ("a", "b", "c")
    for name in names:
        write_run(tmp_path / name, [1.0])
    kept = series_folder(tmp_path, "a").parent
    for folder, age in ((kept / ".new-old", 7200), (kept / ".new-now", 0), (kept / "of-someone-else", 7200)):
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age,) * 2)
    store = Store(tmp_path)
    try:
        assert not (kept / ".new-old").exists()
        all_read(store, names)
        assert all(series_folder(tmp_path, name).is_dir() for name in names)
        shutil.rmtree(tmp_path / "b")
        (tmp_path / "c").rename(tmp_path / "d")
        store.refresh()
        left = {series_folder(tmp_path, "a").name, ".new-now", "of-someone-else"}
        assert {each.name for each in kept.iterdir()} == left
    finally:
        store.close()
    shutil.rmtree(tmp_path / "a")
    Store(tmp_path).close()  # which has listed other runs than the last server
    assert not series_folder(tmp_path, "a").exists()


def test_a_run_whose_log_cannot_be_followed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own(write_run(tmp_path / "runs" / "a", [1.0], None, closed=False), os.getpid())
    store = Store(tmp_path / "runs")
    live = store.series("a")
    assert not isinstance(live, str)

    def fail(*words: object) -> bool:
        raise OverflowError("too large")

    monkeypatch.setattr(live, "update", fail)
    store.start()
    deadline = time.monotonic() + 30
    while not isinstance(store.series("a"), str):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert store.series("a") == "OverflowError: too large"
    store.close()
