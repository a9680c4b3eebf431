"""Several tasks of a Slurm step, which srun has started: they join, obey Slurm's signals, and share a run folder."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from pulsetrain import SignalWatch, Trainer
from pulsetrain.engine import ConfigurationError, Events
from pulsetrain.engine.checkpoint import find_checkpoints
from pulsetrain.engine.distributed.failures import Warden
from pulsetrain.engine.distributed.joining import join
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.log.run_file import read_run_file
from pulsetrain.handlers import Checkpointer, CSVLogger, EventRecorder
from pulsetrain.training import agreement, shared_folders
from tests.support.models import pairs
from tests.support.models import trainer as alone
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import linear, make


def as_task(rank: int) -> None:
    """The environment as srun leaves it, but for the port, which another test may use at the same time."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        del os.environ[name]
    os.environ |= {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost",
    }  # fmt: skip


def endless(folder: Path, *handlers: Any) -> Trainer:
    recording = [EventRecorder(folder), Checkpointer(folder), *handlers]
    return make(linear(), DataLoader(pairs(16), 4), *recording, max_epochs=10_000)


@pytest.mark.parametrize(
    ("who", "name"),
    [
        ((1,), "SIGUSR1"),
        pytest.param((0, 1), "SIGUSR1", marks=pytest.mark.slow),
        pytest.param((0,), "SIGUSR2", marks=pytest.mark.slow),
        pytest.param((0, 1), "SIGTERM", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_signal_of_slurm_ends_all_tasks_of_a_plain_script_with_a_checkpoint(
    who: tuple[int, ...], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # it would end a process that is still saving, if another one's end were taken for a failure
    monkeypatch.setattr(agreement, "Warden", partial(Warden, interval=0.1, grace=0.2))

    def body(rank: int) -> None:
        as_task(rank)
        for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # an earlier test may have left a handler
            faulthandler.unregister(each)
            signal.signal(each, signal.SIG_DFL)
        assert ranks() == (rank, 2)
        made = endless(tmp_path)
        if rank in who:
            made.on(Events.ITERATION_COMPLETED(once=7))(lambda: os.kill(os.getpid(), signal.Signals[name]))
        if rank == 0:
            made.on(Events.COMPLETED)(lambda: time.sleep(1.0))  # a long last save
        made.train()

    ended = in_processes(body)
    assert [(each.status, each.error) for each in ended] == [(128 + signal.Signals[name], "")] * 2
    assert [EventLog(tmp_path / "events", rank).ended for rank in (0, 1)] == [True, True]
    last = [list(EventLog(tmp_path / "events", rank).read(event="completed"))[-1].iteration for rank in (0, 1)]
    assert last[0] == last[1] >= 7
    (start,) = read_run_file(tmp_path)["starts"]
    assert (start["slurm_job"], len(start["processes"])) == ("4711", 2)
    assert max(int(each.name[:9]) for each in find_checkpoints(tmp_path / "checkpoints")) == last[0]


def test_a_folder_that_one_process_does_not_see_is_refused_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_folders, "_PATIENCE", 0.5)
    (tmp_path / "of host 1").mkdir()
    exists = Path.exists

    def on_host_1(path: Path) -> bool:
        return exists(Path(str(path).replace(f"{tmp_path}/local", f"{tmp_path}/of host 1")))

    def body(rank: int) -> list[str]:
        as_task(rank)
        said = []
        if rank == 1:
            monkeypatch.setattr(Path, "exists", on_host_1)
        for folder in (tmp_path / "local", tmp_path / "shared", tmp_path / f"of rank {rank}"):
            handlers = [EventRecorder(folder), Checkpointer(folder), CSVLogger(folder)]
            made = make(linear(), DataLoader(pairs(16), 4), *handlers)
            try:
                made.train()
                assert made.state.epoch == 2
                said.append("")
            except ConfigurationError as refused:
                said.append(str(refused))
        return said

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    host = os.uname().nodename
    said = (
        f"the run folder {tmp_path}/local of rank 0 on {host} is not the same folder everywhere: rank 1 on {host} "
        "cannot see what rank 0 writes there; put it on storage that all hosts share under one path"
    )
    assert first.value == second.value == [said, "", ""]
    assert list(tmp_path.rglob(".seen*")) == []
    assert not (tmp_path / "local" / "metrics.csv").exists(), "a run that is refused has not begun"


@pytest.mark.slow
def test_tasks_wait_together_for_a_folder_that_an_earlier_run_still_uses(tmp_path: Path):
    def run(epochs: int) -> Trainer:
        return make(linear(), DataLoader(pairs(16), 4), Checkpointer(tmp_path), max_epochs=epochs)

    def earlier() -> None:
        for name in ("SLURM_STEP_ID", "SLURM_JOB_ID"):
            del os.environ[name]
        made = run(1)
        made.on(Events.ITERATION_COMPLETED(once=1))(lambda: (tmp_path / "begun").touch() or time.sleep(8.0))
        made.train()

    def body(rank: int) -> int:
        as_task(rank)
        if rank == 0 and not os.fork():
            try:
                earlier()
            finally:
                os._exit(0)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        join().timeout = 4.0
        made = run(2)
        made.train(resume="latest", wait=True)
        return made.state.iteration

    ended = in_processes(body)
    assert [(each.error, each.value) for each in ended] == [("", 8)] * 2


def test_signals_that_the_program_handles_are_left_to_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    faulthandler.register(signal.SIGUSR2)
    try:
        run = alone({"max_epochs": 1})
        run.on(Events.ITERATION_COMPLETED(once=3))(lambda: signal.raise_signal(signal.SIGUSR1))
        run.on(Events.ITERATION_COMPLETED(once=4))(lambda: signal.raise_signal(signal.SIGUSR2))
        with SignalWatch(names=("SIGINT",)):
            run.train()
        assert "SIGUSR2" not in SignalWatch()._names
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR1, before)
    assert (got, run.state.iteration) == ([signal.SIGUSR1], 10)
    assert "SIGUSR2" in SignalWatch()._names
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert "SIGUSR2" not in SignalWatch()._names
    signal.signal(signal.SIGUSR2, before)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert SignalWatch()._names == ("SIGINT", "SIGTERM", "SIGUSR1")


def test_outside_of_a_job_a_signal_ends_a_plain_script_as_usual():
    def body(rank: int) -> None:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        run = alone({"max_epochs": 1})
        run.on(Events.ITERATION_COMPLETED(once=3))(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        run.train()

    assert in_processes(body, 1)[0].status == -signal.SIGUSR1
