"""A full, read-only or missing disk costs only the checkpoints it cannot store; the run and older ones survive."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from pulsetrain import Trainer
from pulsetrain.engine import Events, Every, Phase
from pulsetrain.engine.checkpoint import CheckpointManager, disk, find_checkpoints, load_checkpoint
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import Checkpointer, CSVLogger, EventRecorder, Plots
from tests.support.models import loader, regression_model, trainer

CHANGING = ("write", "fsync", "mkdir", "rename", "replace")  # and `open`, where it makes a file


class FullDisk:
    """The module `os` on a disk where the calls that write fail, from a given one on, or only that one."""

    def __init__(self, fails_at: int | None = None, *, alone: bool = False) -> None:
        self.fails_at, self.alone, self.count = fails_at, alone, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in (*CHANGING, "open"):
            return real

        def call(*arguments: Any) -> Any:
            if name != "open" or arguments[1] & os.O_CREAT:
                self._take()
            return real(*arguments)

        return call

    def _take(self) -> None:
        number, self.count = self.count, self.count + 1
        if self.fails_at is not None and (number == self.fails_at or (number > self.fails_at and not self.alone)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def make(folder: Path, **options: Any) -> Trainer:
    options = {"every": Every(iterations=1), "metric": "val/loss", "keep_last": 2, "at_end": False, **options}
    return trainer(
        {"max_epochs": 1, "validate_every": Every(iterations=1)},
        train_loader=loader(16, batch_size=4),  # 4 iterations
        val_loader=loader(4, shuffle=False),
        handlers=[Checkpointer(folder, **options)],
    )


def announced(run: Trainer) -> list[int]:
    """The iterations of the checkpoints announced, each whole at that moment."""
    found: list[int] = []

    def note(engine: Trainer, event: Any) -> None:
        assert load_checkpoint(event.payload.path)["counters"]["iteration"] == event.payload.iteration
        found.append(event.payload.iteration)

    run.add_event_handler(Events.CHECKPOINT_SAVED, note)
    return found


def complaints(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line["event"].startswith("checkpoint not saved")]


def calls_of_a_run(folder: Path) -> tuple[int, int]:
    """How many calls change the disk until the third checkpoint begins, and until it is there."""
    counting = FullDisk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "os", counting)
        run, marks = make(folder), []
        run.add_event_handler(Events.ITERATION_COMPLETED, lambda: marks.append(counting.count), phase=Phase.OBSERVE)
        run.train()
    return marks[2], marks[3]


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False], ids=["once", "from_then_on"])
def test_a_full_disk_at_any_call_loses_at_most_that_checkpoint(
    alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begin, end = calls_of_a_run(tmp_path / "counted")
    assert end - begin > 10
    for number in range(begin, end):
        folder = tmp_path / str(number)
        monkeypatch.setattr(disk, "os", FullDisk(number, alone=alone))
        run = make(folder)
        saved = announced(run)
        with structlog.testing.capture_logs() as logs:
            run.train()
        monkeypatch.undo()
        assert run.state.iteration == 4
        assert saved[:2] == [1, 2]
        failed = {line["iteration"] for line in complaints(logs)}
        assert failed == {1, 2, 3, 4} - set(saved)
        assert all("No space left" in line["error"] for line in complaints(logs))
        if alone:
            assert saved[-1] == 4
        manager = CheckpointManager(folder / "checkpoints")
        # the failed one may be there: whole, and not known to be durable
        latest = load_checkpoint(manager.get_latest())["counters"]["iteration"]
        assert latest == saved[-1] or latest in failed
        assert manager.valid() == find_checkpoints(manager.checkpoint_dir)
        load_checkpoint(manager.get_best())


def test_after_the_disk_was_full_the_run_resumes_from_the_last_announced_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begin, _ = calls_of_a_run(tmp_path / "counted")
    whole = make(tmp_path / "whole")
    whole.train()
    monkeypatch.setattr(disk, "os", FullDisk(begin))
    run = make(tmp_path / "full")
    saved = announced(run)
    with structlog.testing.capture_logs():
        run.train()
    monkeypatch.undo()
    assert saved == [1, 2]
    again = make(tmp_path / "full")
    again.train(resume="latest")
    assert all(torch.equal(value, whole.model.state_dict()[name]) for name, value in again.model.state_dict().items())


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, or of another size."""
    folder, size = tmp_path / "small", getattr(request, "param", "1m")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_on_a_small_disk_that_fills_up_the_run_ends_and_what_was_announced_is_there(small_disk: Path):
    class Grown(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = regression_model()
            self.register_buffer("table", torch.zeros(70_000))  # 280 kB: three of them fit

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner(inputs)

    run = trainer(
        {"max_epochs": 1},
        model=Grown(),
        train_loader=loader(24, batch_size=4),
        handlers=[Checkpointer(small_disk / "run", every=Every(iterations=1), keep_last=9, at_end=False)],
    )
    saved = announced(run)
    with structlog.testing.capture_logs() as logs:
        run.train()
    assert run.state.iteration == 6
    assert saved == [1, 2, 3]
    assert [line["iteration"] for line in complaints(logs)] == [4, 5, 6]
    assert all("No space left" in line["error"] for line in complaints(logs))
    manager = CheckpointManager(small_disk / "run" / "checkpoints")
    assert [load_checkpoint(path)["counters"]["iteration"] for path in manager.valid()] == saved
    assert list(manager.checkpoint_dir.glob(".*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("small_disk", ["2m"], indirect=True)  # room for the lines that wait, and to seal them
def test_a_disk_that_is_full_for_a_while_costs_no_event_and_no_row(small_disk: Path):
    folder = small_disk / "run"
    run = trainer(
        {"max_epochs": 60, "log_every_n_steps": 5, "validate_every": Every(epochs=10)},
        train_loader=loader(48, batch_size=4),
        val_loader=loader(4, shuffle=False),
        handlers=[
            Checkpointer(folder, every=Every(epochs=20), metric="val/loss"),
            EventRecorder(folder),
            CSVLogger(folder),
            Plots(folder, formats=["svg"]),  # figures would fill it
        ],
    )
    filler = small_disk / "filler"

    @run.on(Events.ITERATION_COMPLETED(once=50))
    def fill() -> None:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    run.add_event_handler(Events.ITERATION_COMPLETED(once=650), lambda: filler.unlink())
    with structlog.testing.capture_logs() as logs:
        run.train()
    assert run.state.iteration == 720
    assert sum("event log cannot be written" in line["event"] for line in logs) == 1
    log = EventLog(folder)
    assert [event.iteration for event in log.read(engine="trainer", event="iteration_completed")] == list(range(1, 721))
    assert (log.ended, log.verify()) == (True, [])
    rows = (folder / "metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 720 // 5 + 6


def test_a_folder_that_is_lost_in_mid_run_costs_the_checkpoints_from_then_on(tmp_path: Path):
    run = make(tmp_path / "run", keep_last=9)
    saved = announced(run)
    checkpoints, moved = tmp_path / "run" / "checkpoints", tmp_path / "moved"

    @run.on(Events.ITERATION_COMPLETED(once=3))
    def lose() -> None:
        checkpoints.rename(moved)
        checkpoints.write_text("a file is where the folder was")

    with structlog.testing.capture_logs() as logs:
        run.train()
    assert run.state.iteration == 4
    assert saved == [1, 2]
    assert [line["iteration"] for line in complaints(logs)] == [3, 4]
    assert len(CheckpointManager(moved).valid()) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
def test_permission_lost_in_mid_run_costs_the_checkpoints_from_then_on(tmp_path: Path):
    run = make(tmp_path / "run", keep_last=9)
    saved = announced(run)
    checkpoints = tmp_path / "run" / "checkpoints"
    run.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: checkpoints.chmod(0o500))
    with structlog.testing.capture_logs() as logs:
        run.train()
    checkpoints.chmod(0o700)
    assert saved == [1, 2]
    assert [line["iteration"] for line in complaints(logs)] == [3, 4]
    assert len(CheckpointManager(checkpoints).valid()) == 2


def test_a_disk_that_becomes_read_only_costs_the_checkpoints_from_then_on(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
):
    # a file that is open for writing would keep `mount` from doing it; a failing disk asks nobody
    monkeypatch.setattr("pulsetrain.handlers.run_files.ownership._owned", lambda *args: None)
    run = make(small_disk / "run", keep_last=9)
    saved = announced(run)

    @run.on(Events.ITERATION_COMPLETED(once=3))
    def protect() -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    with structlog.testing.capture_logs() as logs:
        run.train()
    assert run.state.iteration == 4
    assert saved == [1, 2]
    assert all("Read-only file system" in line["error"] for line in complaints(logs))
    assert [line["iteration"] for line in complaints(logs)] == [3, 4]
    reader = CheckpointManager(small_disk / "run" / "checkpoints")  # reading asks for nothing more
    assert load_checkpoint(reader.get_latest())["counters"]["iteration"] == 2


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(small_disk: Path):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunFolderError, match=r"cannot be used: .*Read-only file system"):
        make(small_disk / "run")


def test_an_error_of_a_receiver_of_the_announcement_is_not_taken_for_a_full_disk(tmp_path: Path):
    run = make(tmp_path)

    @run.on(Events.CHECKPOINT_SAVED)
    def fail() -> None:
        raise OSError("their own")

    with pytest.raises(OSError, match="their own"):
        run.train()
    handler = run.handlers[0]
    assert handler.saved_at == 1
    assert len(handler.manager.valid()) == 1
