"""Who owns a run folder where hosts do not see each other's locks, and what a refusal says of the owner."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from pulsetrain.engine import file_lock, file_system
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.file_system import FileSystem
from pulsetrain.handlers.run_files import owner_file, owner_process
from pulsetrain.handlers.run_files.owner_file import OWNER_FILE, OwnerFile
from tests.support.runs_folders import child


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, seconds in (("_BEAT", 0.02), ("_SILENT", 1.0), ("_SETTLE", 0.05)):
        monkeypatch.setattr(owner_file, name, seconds)
    file_system.report_once.cache_clear()
    yield
    file_system.report_once.cache_clear()


def no_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(file_lock.fcntl, "flock", refuse)


def locks_of_one_host(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Each host would get the lock."""
    monkeypatch.setattr(owner_file, "file_system_of", lambda path: FileSystem("nfs4", ("rw", "local_lock=flock")))
    monkeypatch.setattr(file_lock.fcntl, "flock", lambda descriptor, operation: None)


WITHOUT_LOCKS = [
    pytest.param(no_locks, errno.ENOLCK, id="ENOLCK"),
    pytest.param(no_locks, errno.ENOSYS, id="ENOSYS"),
    pytest.param(no_locks, errno.EOPNOTSUPP, id="EOPNOTSUPP"),
    pytest.param(locks_of_one_host, 0, id="of one host"),
]
Without = Callable[[pytest.MonkeyPatch, int], None]


def on_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process knows of processes says nothing about those of owners."""
    for module in (owner_file, owner_process):
        monkeypatch.setattr(module, "processes", lambda: "another start")


def description(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((folder / OWNER_FILE).read_bytes())
    return found


@pytest.mark.parametrize(("without", "number"), WITHOUT_LOCKS)
def test_the_owner_touches_its_file_and_others_are_refused(
    without: Without, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    without(monkeypatch, number)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")

    def own(ready: Callable[[], None], wait: Callable[[], None]) -> None:
        mine = OwnerFile(tmp_path)
        ready()
        wait()
        mine.release()

    with capture_logs() as logs:
        with child(own) as (pid, end):
            on_another_host(monkeypatch)
            for job, named in (("4711", "Slurm job 4711 (this one)"), ("5", "Slurm job 4711 since")):
                monkeypatch.setenv("SLURM_JOB_ID", job)
                with pytest.raises(RunFolderError) as refused:
                    OwnerFile(tmp_path, "Checkpointer", "runs/a")
                said = str(refused.value)
                assert f"is in use by process {pid} on {os.uname().nodename} in {named}" in said
                assert "Checkpointer" in said
                assert "runs/a" in said
            end()
        assert not (tmp_path / OWNER_FILE).exists()
        OwnerFile(tmp_path).release()
    assert os.listdir(tmp_path) == []
    assert [each["event"] for each in logs if "no locks between hosts" in each["event"]] != []
    assert len(logs) == 1, "it is said once"


def test_a_folder_whose_owner_was_killed_on_another_host_is_free_once_nobody_touches_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    no_locks(monkeypatch, errno.ENOLCK)
    left = {"pid": os.getpid(), "host": "gpu01", "since": "yesterday", "processes": "another start"}
    (tmp_path / OWNER_FILE).write_bytes(msgspec.json.encode(left))
    mine = OwnerFile(tmp_path)
    assert description(tmp_path)["host"] == os.uname().nodename
    first = (tmp_path / OWNER_FILE).stat().st_mtime_ns
    until = time.monotonic() + 30
    while (tmp_path / OWNER_FILE).stat().st_mtime_ns == first:
        assert time.monotonic() < until, "nobody touches it"
        time.sleep(0.01)
    mine.release()
    assert os.listdir(tmp_path) == []


def test_a_folder_whose_owner_was_killed_on_this_host_is_free_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    no_locks(monkeypatch, errno.ENOLCK)
    monkeypatch.setattr(owner_file, "_SILENT", 1e9)
    pid = os.fork()
    if not pid:
        OwnerFile(tmp_path)
        os._exit(0)
    os.waitpid(pid, 0)
    assert description(tmp_path)["pid"] == pid
    mine = OwnerFile(tmp_path)
    assert description(tmp_path)["pid"] == os.getpid()
    mine.release()


def test_waiting_ends_with_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    no_locks(monkeypatch, errno.ENOSYS)
    first = OwnerFile(tmp_path)

    def own(ready: Callable[[], None], wait: Callable[[], None]) -> None:
        ready()
        OwnerFile(tmp_path, wait=True).release()
        (tmp_path / "had it").touch()

    with child(own) as (_, _end):
        assert not (tmp_path / "had it").exists()
        first.release()
    assert os.listdir(tmp_path) == ["had it"]


def test_an_owner_that_was_taken_for_dead_says_so_and_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    no_locks(monkeypatch, errno.ENOLCK)
    with capture_logs() as logs:
        mine = OwnerFile(tmp_path, named="runs/a")
        (tmp_path / OWNER_FILE).write_bytes(b"{}")
        assert mine._heart is not None
        mine._heart.join(30)
        mine.release()
    assert (tmp_path / OWNER_FILE).read_bytes() == b"{}"
    (said,) = [each for each in logs if "another process owns the run folder now" in each["event"]]
    assert (said["log_level"], said["folder"]) == ("error", "runs/a")


def test_of_several_processes_that_take_a_dead_owners_folder_one_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    no_locks(monkeypatch, errno.ENOLCK)
    monkeypatch.setattr(owner_file, "_SILENT", 0.3)
    monkeypatch.setattr(owner_file, "_SETTLE", 0.2)
    (tmp_path / OWNER_FILE).write_bytes(b"")
    children = []
    for _ in range(3):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                OwnerFile(tmp_path)
                time.sleep(1.5)
                status = 0
            except RunFolderError:
                status = 2
            finally:
                os._exit(status)
        children.append(pid)
    statuses = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)
    assert statuses == [0, 2, 2]


def test_a_file_that_another_host_has_removed_meanwhile_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real, stale = os.path.samestat, [OSError(errno.ESTALE, "Stale file handle")]

    def samestat(first: os.stat_result, second: os.stat_result) -> bool:
        if stale:
            raise stale.pop()
        return real(first, second)

    monkeypatch.setattr(owner_file.os.path, "samestat", samestat)
    with capture_logs() as logs:
        mine = OwnerFile(tmp_path)
    assert (stale, logs, mine._heart) == ([], [], None)
    assert description(tmp_path)["pid"] == os.getpid()
    mine.release()
    assert os.listdir(tmp_path) == []


def test_that_this_host_has_no_process_of_an_owners_number_says_nothing_about_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    no_locks(monkeypatch, errno.ENOLCK)
    with monkeypatch.context() as there:
        on_another_host(there)
        # of this module alone: what is collected as garbage meanwhile asks `os` itself
        there.setattr(owner_file, "os", SimpleNamespace(**{**vars(os), "getpid": lambda: 1 << 30}))
        first = OwnerFile(tmp_path)
    with pytest.raises(RunFolderError, match=f"in use by process {1 << 30} on "):
        OwnerFile(tmp_path)
    first.release()
