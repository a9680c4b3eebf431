"""`pulsetrain where` names the process that the others wait for, after everything was killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pulsetrain import Trainer
from pulsetrain.cli import main
from pulsetrain.engine import Events, Every
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.engine.recording.log.stall import StallWatch
from pulsetrain.engine.recording.where import positions, stragglers
from pulsetrain.handlers import Checkpointer, EventRecorder
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import linear, make


class Slow(Dataset[Any]):
    """Its row 17 is never read to the end in one process."""

    def __init__(self, stop: Callable[[], object]) -> None:
        self.data, self.stop = pairs(40), stop

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        self.stop()
        return self.data[index]


class SlowStep(nn.Module):
    def __init__(self, stop: Callable[[], object]) -> None:
        super().__init__()
        self.layer, self.stop = linear(), stop

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.stop()
        output: torch.Tensor = self.layer(inputs)
        return output


@pytest.mark.parametrize(
    ("place", "event", "who"),
    [
        ("loader", "get_batch_started", 0),
        pytest.param("step", "iteration_started", 1, marks=pytest.mark.slow),
        pytest.param("save", "iteration_completed", 0, marks=pytest.mark.slow),
        pytest.param("loader", "get_batch_started", 1, marks=pytest.mark.slow),
        pytest.param("step", "iteration_started", 0, marks=pytest.mark.slow),
        pytest.param("handler", "iteration_completed", 0, marks=pytest.mark.slow),
        ("handler", "iteration_completed", 1),
    ],
)
def test_the_rank_that_hangs_is_named_after_everything_was_killed(
    place: str, event: str, who: int, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "pulsetrain.handlers.recorder.event_recorder.StallWatch", partial(StallWatch, interval=0.2)
    )  # forked processes have it, too

    def body(rank: int) -> None:
        at: list[Trainer] = []

        def sleep() -> None:
            if rank == who and at and at[0].state.iteration == 6:
                asleep.touch()
                time.sleep(200)

        def since(stall: Path) -> bool:
            return stall.exists() and stall.stat().st_mtime > asleep.stat().st_mtime

        def kill() -> None:
            stalls = [tmp_path / "events" / f"stall.rank{each}.json" for each in (0, 1)]
            until = time.monotonic() + 120.0
            while time.monotonic() < until and not (asleep.exists() and all(map(since, stalls))):
                time.sleep(0.05)
            time.sleep(0.5)  # the last stacks
            for process in (tmp_path / f"pid{1 - rank}", tmp_path / f"pid{rank}"):
                with suppress(ProcessLookupError):  # at once, so that none sees the end of the other
                    os.kill(int(process.read_text()), signal.SIGKILL)

        data = Slow(sleep) if place == "loader" else pairs(40)
        model = SlowStep(sleep if place == "step" else (lambda: None))
        handlers = [EventRecorder(tmp_path), Checkpointer(tmp_path, every=Every(iterations=6))]
        # those that wait for a handler do so in a pulse of the same iteration
        every = 1 if place == "handler" else 50
        made = make(model, DataLoader(data, 4), *handlers, max_epochs=4, log_every_n_steps=every)
        at.append(made)
        if place == "handler":
            made.on(Events.ITERATION_COMPLETED)(sleep)
        if place == "save":
            monkeypatch.setattr(os, "fsync", lambda descriptor: sleep())
        (tmp_path / f"pid{rank}").write_text(str(os.getpid()))
        threading.Thread(target=kill, daemon=True).start()
        made.train()

    asleep = tmp_path / "asleep"
    in_processes(body)
    found = positions(tmp_path)
    (last,) = stragglers(found)
    assert last.rank == who, [str(each) for each in found]
    assert last.event.event == event
    assert last.stall is not None
    assert "sleep" in last.place
    capsys.readouterr()
    begun = time.process_time()
    assert main(["where", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"rank {who}: the others wait for it" in said
    assert time.process_time() - begun < 1.0
    assert main(["where", str(tmp_path), "--format", "json"]) == 0
    assert [each["waited_for"] for each in json.loads(capsys.readouterr().out)] == [who == 0, who == 1]


@pytest.mark.parametrize(
    ("reached", "ended", "said"),
    [
        ((7, 7), (), "all processes are equally far"),
        ((7, 9), (), "rank 0: the others wait for it"),
        ((7, 9), (1,), "rank 0: not ended, unlike the others"),
        ((7, 7, 9), (), "ranks 0, 1: not as far as the others"),
        ((7, 7, 9), (2,), "ranks 0, 1: not ended, unlike the others"),
    ],
)
def test_where_names_who_lags(reached: tuple[int, ...], ended: tuple[int, ...], said: str, tmp_path: Path, capsys: Any):
    for rank, iteration in enumerate(reached):
        writer = LogWriter(tmp_path / "events", rank)
        writer.add(LoggedEvent(ord=0, engine="trainer", event="iteration_completed", iteration=iteration, seq=0, t=1))
        if rank in ended:
            writer.end()
    assert main(["where", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_where_shows_many_processes_together_and_those_that_lag_alone(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    for rank in range(40):
        writer, iteration = LogWriter(tmp_path / "events", rank), 6 if rank in (17, 30) else 7
        event = LoggedEvent(ord=0, engine="trainer", event="iteration_started", epoch=1, iteration=iteration, seq=0)
        event.t = (900 if rank in (3, 17) else 960) * 10**9
        writer.add(event)
        if rank == 39:
            writer.end()
        writer.close()
    monkeypatch.setattr("pulsetrain.cli.where.time.time", lambda: 1000.0)
    assert main(["where", str(tmp_path)]) == 0
    here, there = "trainer's iteration_started at epoch 1, iteration ", " s ago, in a step"
    assert capsys.readouterr().out.splitlines() == [
        f"ranks 0 to 16, 18 to 29, 31 to 38  {here}7: 40 to 100{there}",
        f"rank 17  {here}6: 100{there}",
        f"rank 30  {here}6: 40{there}",
        f"rank 39  {here}7: the run has ended",
        "ranks 17, 30: not as far as the others",
    ]
