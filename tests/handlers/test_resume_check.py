"""A resumed run is compared with what its log holds past the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from engine import Events, Every, SupervisedStrategy
from handlers import Checkpointer, EventRecorder
from handlers.resume_check import ResumeCheck
from pulsetrain import Trainer, TrainingConfig


def make(folder: Path, seed: int = 0, dropout: float = 0.2) -> Trainer:
    torch.manual_seed(0)
    inputs = torch.randn(40, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1)),
        DataLoader(data, batch_size=4, shuffle=True),
        DataLoader(data, batch_size=20),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_epochs=3, log_every_n_steps=5, accumulate=2, seed=seed),
        handlers=[Checkpointer(folder, every=Every(iterations=6), keep_last=20), EventRecorder(folder)],
    )


def killed_at(run: Trainer, iteration: int) -> None:
    def pull(engine: Trainer) -> None:
        if engine.state.iteration == iteration:
            engine.handlers[1].flush()  # as far as the log had come
            raise ZeroDivisionError

    run.add_event_handler(Events.ITERATION_COMPLETED, pull, phase=3)
    with pytest.raises(ZeroDivisionError):
        run.train()


def said(logs: list[Any]) -> list[Any]:
    return [entry for entry in logs if entry["event"].startswith("resumed")]


def test_a_resume_that_is_exact_says_so_once_with_the_number_of_events(tmp_path: Path):
    killed_at(make(tmp_path), 17)  # the last checkpoint is at 12
    run = make(tmp_path)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert entry["log_level"] == "info"
    assert "exactly" in entry["event"]
    check = run.handlers[1].resume_check
    # 5 iterations: started and completed, two updates' events and one log point
    assert entry["events"] == check.agreed == 5 * 2 + 2 * 2 + 1
    assert (check.waiting, check.difference) == (0, None)


def test_a_difference_names_the_first_event_with_both_sides(tmp_path: Path):
    killed_at(make(tmp_path), 17)
    run = make(tmp_path, dropout=0.2)

    @run.on(Events.ITERATION_STARTED(once=15))
    def disturb() -> None:
        torch.rand(1)  # a draw that was not there before

    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert entry["log_level"] == "warning"
    assert entry["first"].startswith('trainer\'s iteration_completed at epoch 2, iteration 15: output: {"loss": ')
    assert " in the log, " in entry["first"]
    assert entry["agreed_before"] > 0


def test_the_end_of_a_finished_run_is_compared_too(tmp_path: Path):
    make(tmp_path).train()  # the last checkpoint is at 30, before the last epoch's end and its validation
    run = make(tmp_path)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert entry["log_level"] == "info"
    assert run.handlers[1].resume_check.waiting == 0


def test_an_event_that_does_not_come_again_is_a_difference(tmp_path: Path):
    first = make(tmp_path)
    killed_at(first, 17)
    log = tmp_path / "events" / "events.jsonl"
    extra = {"seq": 0, "t": 0, "engine": "trainer", "event": "spike_seen", "epoch": 2, "iteration": 14}
    log.write_text(log.read_text() + json.dumps(extra) + "\n")
    run = make(tmp_path)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert entry["first"] == "trainer's spike_seen at epoch 2, iteration 14 is in the log, and did not come again"


def test_of_several_attempts_the_longest_counts_and_cut_lines_are_passed_over(tmp_path: Path):
    def line(event: str, iteration: int, **fields: Any) -> str:
        return json.dumps({"engine": "trainer", "event": event, "epoch": 1, "iteration": iteration, **fields})

    saved = {"path": "runs/a/checkpoints/000000004-checkpoint"}
    lines = [
        line("iteration_completed", 4, output={"loss": 9.0}),
        line("checkpoint_saved", 4, payload=saved),
        line("iteration_completed", 5, output={"loss": 1.0}),
        line("iteration_completed", 6, output={"loss": 2.0}),
        '{"engine": "trainer", "event": "iter',
        line("checkpoint_loaded", 4, payload=saved),
        line("iteration_completed", 5, output={"loss": 1.0}),
        line("checkpoint_saved", 5, payload={"path": "runs/a/checkpoints/000000005-checkpoint"}),
        line("checkpoint_loaded", 2, payload={"path": "runs/a/checkpoints/000000002-checkpoint"}),
        line("iteration_completed", 3, output={"loss": 7.0}),
    ]
    log = tmp_path / "events.jsonl"
    log.write_text("\n".join(lines) + "\n")
    check = ResumeCheck.of_log(log, "000000004-checkpoint")
    assert check is not None
    assert check.waiting == 2
    check.see(line("iteration_completed", 5, output={"loss": 1.0}).encode())
    assert (check.agreed, check.difference) == (1, None)
    check.see(line("iteration_completed", 6, output={"loss": 2.0000000000000004}).encode())
    assert check.difference is not None
    assert "2.0 " not in check.difference.split("now")[0].split("log")[1]
    assert ResumeCheck.of_log(log, "000000009-checkpoint") is None
    assert ResumeCheck.of_log(tmp_path / "none.jsonl", "000000004-checkpoint") is None


def test_times_and_rates_are_not_compared():
    record = {"engine": "trainer", "event": "metrics_logged", "epoch": 1, "iteration": 5}
    check = ResumeCheck([{**record, "payload": {"metrics": {"train/loss": 1.0, "samples_per_second": 10.0}}}])
    check.see(json.dumps({**record, "payload": {"metrics": {"train/loss": 1.0, "samples_per_second": 99.0}}}).encode())
    assert (check.agreed, check.difference) == (1, None)
