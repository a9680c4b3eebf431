"""One run owns a run folder: other runs are refused or wait, and forked processes write nothing into its records."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pulsetrain import Trainer
from pulsetrain.cli import main
from pulsetrain.configuration.claim import Claim
from pulsetrain.engine import Events, Every
from pulsetrain.engine import file_lock as lock_module
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.events.payloads import MetricsLogged
from pulsetrain.engine.file_system import report_once
from pulsetrain.engine.recording import EventLog, Replay, diff
from pulsetrain.handlers import (
    Checkpointer,
    CrashBundle,
    CSVLogger,
    EventRecorder,
    JSONLinesLogger,
    Plots,
    Profiler,
)
from pulsetrain.handlers.run_files import owner_file
from pulsetrain.handlers.run_files.owner_file import OWNER_FILE
from tests.support.models import loader, trainer
from tests.support.runs_folders import RECORDING, Make, child, files, in_a_run, make

WRITING: dict[str, Make] = {
    **RECORDING,
    "CrashBundle": CrashBundle,
    "Profiler": Profiler,
}


@contextmanager
def running_elsewhere(folder: Path, *handlers: Make) -> Iterator[tuple[int, Callable[[], None]]]:
    """Another process trains in the folder."""

    def body(ready: Callable[[], None], wait: Callable[[], None]) -> None:
        run = make(folder, *handlers)
        in_a_run(run, 7, lambda: (ready(), wait()))
        run.train()

    with child(body) as (pid, end):
        yield pid, end


def refused_in_a_child(folder: Path) -> bool:
    """Whether another process cannot train there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            make(folder, CrashBundle).train()
            status = 0
        except RunFolderError as error:
            status = 2 if "is in use by process" in str(error) else 0  # the folder may hold a run that has ended
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2


# ------------------------------------------------------------------------------------------------------- one owner


@pytest.mark.parametrize("second", WRITING)
def test_a_folder_that_another_process_trains_in_is_refused_before_anything_is_written(second: str, tmp_path: Path):
    owner = "CSVLogger" if second != "CSVLogger" else "CrashBundle"
    with running_elsewhere(tmp_path, WRITING[owner]) as (pid, _):
        before = files(tmp_path)
        resumes = {"resume": "latest"} if second.startswith("Checkpointer") else {}
        with pytest.raises(RunFolderError) as refused:
            make(tmp_path, WRITING[second]).train(**resumes)
        assert files(tmp_path) == before
    assert f"is in use by process {pid} on {socket.gethostname()} since 2" in str(refused.value)
    assert "wait=True" in str(refused.value)


@pytest.mark.parametrize("owner", [*WRITING, pytest.param("Plots", marks=pytest.mark.slow)])
def test_whatever_a_run_writes_it_owns_the_folder_until_it_ends(owner: str, tmp_path: Path):
    run = make(tmp_path, {**WRITING, "Plots": Plots}[owner])
    found: list[bool] = []
    in_a_run(run, 3, lambda: found.append(refused_in_a_child(tmp_path)))
    run.train()
    assert found == [True]
    assert ".owner" not in files(tmp_path)
    assert not refused_in_a_child(tmp_path)


@pytest.mark.parametrize("fails", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_run_that_failed_owns_nothing(fails: type[BaseException], tmp_path: Path):
    run = make(tmp_path, *RECORDING.values())

    def fail() -> None:
        raise fails

    in_a_run(run, 3, fail)
    with pytest.raises(fails):
        run.train()
    assert ".owner" not in files(tmp_path)
    make(tmp_path, CSVLogger, Checkpointer).train(resume="latest")


def test_a_killed_process_owns_nothing_even_if_a_child_of_it_lives(tmp_path: Path):
    def body(ready: Callable[[], None], wait: Callable[[], None]) -> None:
        run = make(tmp_path, CSVLogger)

        def fork() -> None:
            if os.fork() == 0:
                ready()
                wait()
                os._exit(0)
            wait()

        in_a_run(run, 3, fork)
        run.train()

    with child(body) as (pid, end):
        assert refused_in_a_child(tmp_path)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert not refused_in_a_child(tmp_path)
        end()


@pytest.mark.slow
def test_loaders_workers_neither_keep_nor_release_the_folder(tmp_path: Path):
    run = trainer({"max_epochs": 2}, train_loader=loader(num_workers=2), handlers=[CrashBundle(tmp_path)])
    found: list[bool] = []
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: found.append(refused_in_a_child(tmp_path)))
    run.train()
    assert found == [True, True]
    assert not refused_in_a_child(tmp_path)


def test_a_run_may_wait_for_the_owners_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with running_elsewhere(tmp_path, Checkpointer, CSVLogger) as (_, end):
        lock = owner_file.lock

        waited: list[bool] = []

        def waiting(descriptor: int, *, wait: bool = False) -> bool | None:
            if not waited and os.fstat(descriptor).st_nlink:  # not the file that only tries whether there are locks
                waited.append(not lock(descriptor))
                end()
            return lock(descriptor, wait=wait)

        monkeypatch.setattr(owner_file, "lock", waiting)
        run = make(tmp_path, Checkpointer, CSVLogger, epochs=2)
        monkeypatch.setattr(
            run, "load_checkpoint", lambda path: monkeypatch.undo() or type(run).load_checkpoint(run, path)
        )
        run.train(resume="latest", wait=True)
    assert waited == [True]
    iterations = [int(row.split(",")[0]) for row in (tmp_path / "metrics.csv").read_text().splitlines()[1:]]
    assert iterations == sorted(iterations)
    assert run.state.iteration == 20


@pytest.mark.parametrize("waits", [True, False])
def test_the_command_line_waits_if_asked_to(waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found: list[bool] = []

    def stop(*arguments: Any, wait: bool, **options: Any) -> None:
        found.append(wait)
        raise KeyboardInterrupt

    monkeypatch.setattr("pulsetrain.cli.train.assemble", stop)
    (tmp_path / "a.yaml").write_text("model: a\ndata: b\n")
    main(["train", str(tmp_path / "a.yaml"), *(["--wait"] if waits else [])])
    assert found == [waits]


def test_a_claimed_folder_has_an_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with running_elsewhere(tmp_path, CSVLogger) as (_, end):
        with pytest.raises(RunFolderError, match="is in use by process"):
            Claim(tmp_path)
        end()
        claim = Claim(tmp_path, wait=True)
    assert refused_in_a_child(tmp_path)
    claim.release()
    assert not refused_in_a_child(tmp_path)
    assert ".owner" not in files(tmp_path)


def test_a_second_run_of_one_process_waits_for_no_run_that_has_ended(tmp_path: Path):
    first = make(tmp_path, Checkpointer, EventRecorder)
    first.train()
    first.validate()  # recorded as well
    second = make(tmp_path, Checkpointer, CSVLogger, epochs=2)
    second.train(resume="latest")
    assert second.state.iteration == 20


def test_a_run_inside_another_one_of_the_process_is_refused_its_folder(tmp_path: Path):
    outer, inner = make(tmp_path, CSVLogger), make(tmp_path, CSVLogger)
    in_a_run(outer, 3, lambda: inner.train() and None)
    with pytest.raises(RunFolderError, match="another run of this process"):
        outer.train()


def test_a_trainer_that_is_gone_owns_nothing(tmp_path: Path):
    run = make(tmp_path, EventRecorder)
    run.train()
    run.validate()
    run.handlers[0].detach()
    del run
    gc.collect()
    assert not refused_in_a_child(tmp_path)


def test_several_handlers_of_one_trainer_share_the_folder_and_it_may_train_again_and_longer(tmp_path: Path):
    run = make(tmp_path, EventRecorder, CSVLogger, JSONLinesLogger, CrashBundle)
    run.train()
    run.train()
    in_a_run(run, 13, lambda: run.terminate())
    run.train()
    run.train()
    assert run.state.iteration == 10
    assert not EventLog(tmp_path).damage


def test_a_checkpoint_saved_outside_of_a_run_respects_the_owner_and_leaves_none(tmp_path: Path):
    idle = make(tmp_path, Checkpointer)
    with running_elsewhere(tmp_path, CSVLogger), pytest.raises(RunFolderError, match="is in use by process"):
        idle.save_checkpoint()
    idle.save_checkpoint()
    assert ".owner" not in files(tmp_path)


def saving_often(folder: Path) -> Checkpointer:
    return Checkpointer(folder, Every(iterations=3))


def test_reading_a_run_takes_nothing(tmp_path: Path):
    with running_elsewhere(tmp_path, EventRecorder, saving_often) as (_, end):
        before = files(tmp_path)
        Replay(tmp_path).run()
        diff(tmp_path, tmp_path)
        reader = make(tmp_path)
        reader.load_checkpoint(tmp_path)
        reader.validate()
        assert files(tmp_path) == before
        end()


def test_a_file_system_without_locks_is_reported_once_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none_here(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    report_once.cache_clear()
    monkeypatch.setattr(lock_module.fcntl, "flock", none_here)
    with capture_logs() as logs:
        run = make(tmp_path, *RECORDING.values())
        run.train()
    assert run.state.iteration == 10
    assert len([each for each in logs if "no locks between hosts" in each["event"]]) == 1
    assert OWNER_FILE not in files(tmp_path)


# ------------------------------------------------------------------------------------------------------------ forks


def continue_training(run: Trainer) -> None:
    """What a child must not write for its parent."""
    run.fire(Events.EPOCH_STARTED)
    for _ in range(3):
        run.fire(Events.ITERATION_COMPLETED)
    run.fire(Events.METRICS_LOGGED, MetricsLogged(metrics={"train/loss": -1.0}))
    run.fire(Events.COMPLETED)
    for handler in run.handlers:
        handler.detach()


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_a_forked_process_writes_nothing_into_its_parents_records(how: str, tmp_path: Path):
    parent = os.getpid()

    def fork(run: Trainer) -> None:
        if os.getpid() != parent:
            return
        if how == "multiprocessing":
            process = multiprocessing.get_context("fork").Process(target=continue_training, args=(run,))
            process.start()
            process.join()
            return
        pid = os.fork()
        if pid == 0:
            try:
                continue_training(run)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

    found = {}
    for name, forks in (("alone", False), ("forked", True)):
        folder = tmp_path / name
        run = make(folder, EventRecorder, CSVLogger, JSONLinesLogger, RECORDING["Checkpointer in the background"])
        if forks:
            run.add_event_handler(Events.ITERATION_COMPLETED(every=4), fork)
        run.train()
        assert not EventLog(folder).damage
        log = [
            (event.seq, event.engine, event.event, event.iteration) for event in EventLog(folder).read(engine="trainer")
        ]
        rows = [row.split(",")[:4] for row in (folder / "metrics.csv").read_text().splitlines()]
        kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
        events = [each[1:] for each in log if each[1] != "checkpoint_saved"]
        found[name] = events, rows, len((folder / "metrics.jsonl").read_text().splitlines()), kept
    assert found["forked"] == found["alone"]


@pytest.mark.parametrize("background", [False, True])
def test_a_forked_process_cannot_save_into_its_parents_run(background: bool, tmp_path: Path):
    parent, outcomes = os.getpid(), []

    def save_in_a_child(run: Trainer) -> None:
        checkpointer = run.handlers[0]
        saves = (
            lambda: run.save_checkpoint("child"),
            lambda: checkpointer.save(run, "child"),
            lambda: checkpointer.manager.save({}, "child"),
            lambda: checkpointer.manager.prune([]),
            lambda: checkpointer.manager.delete_after(0),
        )
        for save in saves:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    save()
                except RunFolderError as error:
                    status = 0 if "forked" in str(error) else 2
                finally:
                    os._exit(status)
            outcomes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    run = make(tmp_path, lambda folder: Checkpointer(folder, Every(iterations=2), keep_last=99, background=background))
    run.add_event_handler(Events.ITERATION_COMPLETED(once=4), save_in_a_child)
    run.train()
    assert os.getpid() == parent
    assert outcomes == [0] * 5
    saved = [path.name for path in run.handlers[0].manager.valid()]
    assert saved
    assert not any("child" in name for name in saved)
    run.save_checkpoint("parent")  # the parent still may


def test_a_child_can_train_what_its_parent_only_made(tmp_path: Path):
    run = make(tmp_path, EventRecorder, CSVLogger)

    def body(ready: Callable[[], None], wait: Callable[[], None]) -> None:
        run.train()
        ready()

    with child(body):
        pass
    assert [event.iteration for event in EventLog(tmp_path).read(event="iteration_completed", engine="trainer")] == [
        *range(1, 11)
    ]
