"""Handlers where several processes train: which act in the main one alone, and which in all alike."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pulsetrain.engine import ConfigurationError, Events, Every
from pulsetrain.engine.events.filters import AfterSeconds
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import (
    Checkpointer,
    ConsoleLogger,
    CSVLogger,
    EventRecorder,
    HuggingFaceCallbacks,
    JSONLinesLogger,
    LossSpikeGuard,
    LRFinder,
    NaNGuard,
    Plots,
    Throughput,
)
from pulsetrain.testing import ManualClock
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import linear, make


def test_only_the_main_process_saves_logs_and_draws(tmp_path: Path):
    def body(rank: int) -> list[str]:
        folder = tmp_path / str(rank)
        handlers = [
            Checkpointer(folder),
            EventRecorder(folder),
            CSVLogger(folder),
            JSONLinesLogger(folder),
            Plots(folder),
            ConsoleLogger(every=Every(iterations=1)),
            EventRecorder(tmp_path / f"own-{rank}", rank=rank),
        ]
        run = make(linear(), DataLoader(pairs(16), 4), *handlers)
        run.train()
        run.save_checkpoint()
        files = sorted(path.name for path in folder.rglob("*") if path.is_file())
        return [name for name in files if not name.startswith("stall.")]  # where one waits for long

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert {"metrics.csv", "metrics.jsonl", "loss.png", "manifest.json"} <= set(first.value)
    assert second.value == ["events.rank1.jsonl.zst", "tail.rank1.jsonl"]
    assert second.stderr == ""
    assert EventLog(tmp_path / "own-1", rank=1).ended


def test_the_progress_line_of_a_default_run_is_the_main_process_own_in_a_second_run_too():
    def body(rank: int) -> list[int]:
        ended = []
        for epochs in (2, 3):
            run = make(linear(), DataLoader(pairs(16), 4), max_epochs=epochs)
            run.train()
            ended.append(run.state.iteration)
        return ended

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value == [8, 12]
    lines = [line for line in first.stderr.splitlines() if line.startswith("epoch")]
    assert [line.split(" (")[0] for line in lines] == ["epoch 2/2, iteration 8/8", "epoch 3/3, iteration 12/12"]
    assert second.stderr == ""


def test_one_run_folder_and_one_seed_for_all(tmp_path: Path):
    def body(rank: int) -> int:
        handlers = [Checkpointer(tmp_path), EventRecorder(tmp_path), CSVLogger(tmp_path), JSONLinesLogger(tmp_path)]
        torch.manual_seed(rank)
        run = make(linear(), DataLoader(pairs(17), 8, shuffle=True), *handlers, seed=None)
        run.train()
        return run.seed

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value
    log = EventLog(tmp_path)
    assert not log.damage
    assert [event.iteration for event in log.read(event="iteration_completed")] == [1, 2, 3, 4, 5, 6]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 6


def test_handlers_that_would_act_in_one_process_alone_are_refused(tmp_path: Path):
    def body(rank: int) -> Any:
        said = []
        for handler in (LossSpikeGuard(policy="stop"), NaNGuard("rewind"), LRFinder()):
            with pytest.raises(ConfigurationError) as refused:
                make(linear(), DataLoader(pairs(16), 4), Checkpointer(tmp_path / "run"), handler)
            said.append(str(refused.value))
        return said

    for ended in in_processes(body):
        assert ended.error == ""
        named = [text.split(" cannot act like this where")[0].split()[-1] for text in ended.value]
        assert named == ["LossSpikeGuard", "NaNGuard", "LRFinder"]


def test_a_loss_that_jumps_in_the_share_of_one_process_is_seen_by_all():
    rows = pairs(160)
    rows.tensors[1][121] = 100.0  # of rank 1's share

    def body(rank: int) -> Any:
        made = make(
            linear(), DataLoader(rows, 4), LossSpikeGuard(window=20, every=Every(iterations=10)), learning_rate=0.01
        )
        found: list[int] = []
        made.on(Events.ANOMALY_DETECTED)(lambda engine, event: found.append(event.payload.at_iteration))
        made.train()
        return found

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value
    assert 31 in first.value


def test_the_main_process_alone_shows_the_progress_line():
    """Also of the second trainer of a process."""

    def body(rank: int) -> None:
        for _ in range(2):
            make(linear(), DataLoader(pairs(16), 4)).train()

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", "")
    lines = [line for line in first.stderr.splitlines() if line.startswith("epoch ")]
    assert [line.split(",")[:2] for line in lines] == [["epoch 2/2", " iteration 8/8 (100%)"]] * 2
    assert "epoch" not in second.stderr


def test_the_speed_of_a_process_is_that_of_its_share_however_its_operations_are_known():
    def body(rank: int) -> list[float]:
        found = []
        for flops_per_sample in (None, 4 * 4):  # forward 2 for each of 4 weights, and as many for their gradients
            clock = ManualClock()
            speed = Throughput(Every(iterations=2), flops_per_sample=flops_per_sample, peak_flops=64.0, clock=clock)
            made = make(linear(), DataLoader(pairs(16), 4), speed, max_epochs=1)
            made.on(Events.ITERATION_STARTED)(lambda clock=clock: setattr(clock, "now", clock.now + 1.0))
            seen: list[Any] = []
            made.on(Events.METRICS_LOGGED)(lambda engine, event, seen=seen: seen.append(event.payload.metrics))
            made.train()
            found.append([each["throughput/mfu"] for each in seen if "throughput/mfu" in each][-1])
        return found

    for ended in in_processes(body):
        assert (ended.error, ended.value) == ("", [0.5, 0.5])  # of 2 samples a second


def test_a_sweep_of_learning_rates_is_refused():
    def body(rank: int) -> str:
        with pytest.raises(ConfigurationError) as refused:
            LRFinder(iterations=20).run(make(linear(), DataLoader(pairs(16), 4)))
        return str(refused.value)

    for ended in in_processes(body):
        assert ended.error == ""
        assert "LRFinder(world_size=2): each process would end the sweep according to its losses" in ended.value


def test_callbacks_of_transformers_know_the_main_process():
    pytest.importorskip("transformers")

    def body(rank: int) -> tuple[bool, bool]:
        os.environ["LOCAL_RANK"] = "0"  # each is the first process of its host
        make(linear(), DataLoader(pairs(16), 4), handler := HuggingFaceCallbacks([]))
        return handler._state.is_world_process_zero, handler._state.is_local_process_zero

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", "")
    assert (first.value, second.value) == ((True, True), (False, True))


def test_the_clock_of_the_main_process_says_when_all_validate():
    def body(rank: int) -> list[int]:
        ticks, make_filter = count(0, 7 if rank else 1), AfterSeconds.__init__
        AfterSeconds.__init__ = lambda self, seconds, clock: make_filter(self, seconds, lambda: next(ticks))  # type: ignore[method-assign]
        loader = DataLoader(pairs(48), 4)
        made = make(linear(), loader, val_loader=loader, validate_every=Every(seconds=5) | Every(epochs=1))
        validated: list[int] = []
        made.on(Events.VALIDATION_COMPLETED)(lambda engine: validated.append(engine.state.iteration))
        made.train()
        return validated

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    # the clock is read once after each iteration, from 0; the iteration after that is the first at which all know
    assert first.value == second.value == [7, 12, 17, 22, 24]
