"""Reading curves in other processes: what is read again, and what is not."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from pulsetrain.serve import background
from pulsetrain.serve.background import Failure
from pulsetrain.serve.series import RunSeries, StoredSeries
from pulsetrain.serve.store import Store
from tests.support.run_folders import write_run
from tests.support.series_store import all_read

REAL = background._store


def kill_at_large(run: Path, folder: Path, sign: str) -> Failure | None:
    """As the system does when memory is exhausted."""
    if run.name == "large":
        os.kill(os.getpid(), signal.SIGKILL)
    return REAL(run, folder, sign)


def kill_after(run: Path, folder: Path, sign: str) -> Failure | None:
    """As the system does, but once the points are written."""
    REAL(run, folder, sign)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def kill(run: Path, folder: Path, sign: str) -> Failure | None:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fail_once(run: Path, folder: Path, sign: str) -> Failure | None:
    """As with a disk that is full for a while."""
    if (folder.parent / "tried").exists():
        return REAL(run, folder, sign)
    (folder.parent / "tried").touch()
    with mock.patch.object(StoredSeries, "write", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        return REAL(run, folder, sign)


def test_only_the_run_whose_process_is_killed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = [f"run-{number}" for number in range(6)]
    for name in [*names, "large"]:
        write_run(tmp_path / name, [1.0])
    monkeypatch.setattr(background, "_store", kill_at_large)
    monkeypatch.setattr(background.os, "cpu_count", lambda: 4)
    store = Store(tmp_path)
    try:
        found = all_read(store, ["large", *names])
        assert found.pop("large") == "the process that read its log was killed; is there enough memory?"
        assert [str(each) for each in found.values() if isinstance(each, str)] == []
        store.refresh()
        assert isinstance(store.series("large"), str)  # it is not tried again
        assert not store._reader._suspects
        assert store.reading == 0
    finally:
        store.close()


@contextmanager
def suspecting(folder: Path) -> Iterator[Store]:
    """A store that suspects run "a", whose reader was killed: give a program that does so to `background._store`."""
    ended = threading.Event()
    store = Store(folder, lambda run: ended.set())
    try:
        ended.clear()
        assert store.series("a") is None
        assert ended.wait(60)
        assert store._reader._suspects == {"a"}
        yield store
    finally:
        store.close()


def test_a_run_whose_points_are_there_is_not_suspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path / "a", [1.0])
    monkeypatch.setattr(background, "_store", kill_after)
    with suspecting(tmp_path) as store:
        assert not isinstance(all_read(store, ["a"])["a"], str)
        assert not store._reader._suspects


def test_a_run_that_was_removed_is_not_suspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = write_run(tmp_path / "a", [1.0])
    monkeypatch.setattr(background, "_store", kill)
    with suspecting(tmp_path) as store:
        shutil.rmtree(run)
        store.refresh()
        assert not store._reader._suspects


def kill_when_asked(run: Path, folder: Path, sign: str) -> Failure | None:
    while not (folder.parent / "now").exists():
        time.sleep(0.01)
    return kill(run, folder, sign)


def test_a_run_that_was_removed_while_it_was_read_is_not_suspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, ended = write_run(tmp_path / "a", [1.0]), threading.Event()
    monkeypatch.setattr(background, "_store", kill_when_asked)
    store = Store(tmp_path, lambda run: ended.set())
    try:
        assert store.series("a") is None
        shutil.rmtree(run)
        store.refresh()
        ended.clear()
        (tmp_path / ".pulsetrain" / "series" / "now").touch()
        assert ended.wait(60)
        assert store._reader._suspects == {"a"}
        store.refresh()
        assert not store._reader._suspects
    finally:
        store.close()


def test_a_reason_that_may_pass_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path / "a", [1.0])
    changed: list[str] = []
    monkeypatch.setattr(background, "_store", fail_once)
    store = Store(tmp_path, changed.append)
    try:
        assert "No space left on device" in str(all_read(store, ["a"])["a"])
        store.refresh()
        assert "No space left on device" in str(store.series("a"))
        monkeypatch.setattr("pulsetrain.serve.store._RETRY", 0.0)
        changed.clear()
        store.refresh()
        assert changed == ["a"]
        assert not isinstance(all_read(store, ["a"])["a"], str)
    finally:
        store.close()


@pytest.mark.parametrize("sign", ["sign", "another"])
def test_points_that_another_server_has_just_written_are_used(
    sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    series, kept, removing = RunSeries(write_run(tmp_path / "a", [1.0, 0.5])), tmp_path / "kept" / "a", shutil.rmtree

    def write_between(folder: Path, **options: bool) -> None:
        removing(folder, **options)
        monkeypatch.setattr(shutil, "rmtree", removing)
        StoredSeries.write(folder, series, sign)

    monkeypatch.setattr(shutil, "rmtree", write_between)
    if sign == "sign":
        assert StoredSeries.write(kept, series, "sign").about == series.described("sign")
    else:
        with pytest.raises(OSError, match="not empty") as error:
            StoredSeries.write(kept, series, "sign")
        assert error.value.errno == errno.ENOTEMPTY
    assert [each.name for each in kept.parent.iterdir()] == ["a"]
    assert StoredSeries.open(kept, sign) is not None
