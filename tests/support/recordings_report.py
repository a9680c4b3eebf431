"""Recorded runs for the tests of the report, written event by event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.report.curve import Curve
from pulsetrain.report.facts import read_facts
from pulsetrain.report.record import RunRecord
from pulsetrain.report.reported_run import PALETTE, ReportedRun

T = 1_763_000_000_000_000_000
ERROR = {"__type__": "builtins.ValueError", "message": "no such row"}


class Run:
    """Writes a run's log event by event."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = LogWriter(folder / "events")

    def add(self, event: str, iteration: int, epoch: int = 1, engine: str = "trainer", **fields: Any) -> LoggedEvent:
        seq = self.log.last_seq + 1
        logged = LoggedEvent(seq, engine, event, epoch, iteration, seq=seq, t=T + 10**9 * iteration, **fields)
        self.log.add(logged)
        return logged

    def step(self, iteration: int, loss: Any, rates: tuple[float, ...] = (0.1, 0.1)) -> None:
        self.add("gradients_ready", iteration, payload={"grad_norm": 2.0})
        self.add("iteration_completed", iteration, output={"loss": loss}, lr=list(rates))

    def end(self) -> Path:
        self.log.end()
        self.log.close()
        return self.folder


def small_run(folder: Path, iterations: int = 12) -> Path:
    run = Run(folder)
    run.add("started", 0, 0)
    for iteration in range(1, iterations + 1):
        run.step(iteration, 3.0 / iteration)
    metrics = {"train/loss": 0.5, "learning_rate": 0.1, "grad_norm": 2.0}
    observed = {"metrics": {"samples_per_second": 800.0}}
    run.add("metrics_logged", iterations, payload={"metrics": metrics}, observed=observed)
    run.add("epoch_completed", iterations, metrics={"val/loss": 0.7, "train/perplexity": 2.0})
    run.add("epoch_completed", 3, engine="evaluator", metrics={"loss": 0.7})
    run.add(
        "validation_completed", iterations, payload={"metrics": {"val/loss": 0.7, "val/accuracy": 0.8}, "seconds": 1}
    )
    saved = {"path": "x/checkpoints/000012-best", "iteration": iterations, "bytes": 2_000_000, "is_best": True}
    run.add("checkpoint_saved", iterations, payload=saved)
    run.add("completed", iterations)
    return run.end()


def record(folder: Path) -> RunRecord:
    return RunRecord(EventLog(folder))


def reported(folder: Path, name: str = "run") -> ReportedRun:
    return ReportedRun(name, PALETTE[0], record(folder), read_facts(folder))


def texts(found: RunRecord, row: str) -> list[tuple[int, str]]:
    return [(mark.iteration, str(mark)) for mark in found.marks[row]]


def values(curve: Curve) -> list[tuple[float, float]]:
    return list(zip(*(each.tolist() for each in curve.points()), strict=True))
