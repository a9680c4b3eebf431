"""What a run says about its losses without being asked."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

import pytest
import structlog
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, SupervisedStrategy
from pulsetrain.handlers import NaNGuard
from pulsetrain.training.running_stats import Losses


def reports(*handlers: object, factor: float, logged: bool = True) -> list[MutableMapping[str, Any]]:
    """What a run of 12 iterations says whose losses are multiplied by this."""
    trainer = Trainer(
        nn.Linear(1, 1),
        [(torch.ones(1, 1), torch.zeros(1, 1))] * 4,
        strategy=SupervisedStrategy(lambda outputs, targets: (outputs - targets).square().mean() * factor),
        config=TrainingConfig(max_epochs=3, log_every_n_steps=2, progress=False),
        handlers=handlers,
    )
    if logged:
        trainer.add_event_handler(Events.METRICS_LOGGED, lambda: None)
    with structlog.testing.capture_logs() as logs:
        trainer.train()
    return [entry for entry in logs if "no handler guards" in entry["event"]]


@pytest.mark.parametrize("logged", [True, False], ids=["logged", "not logged"])
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_reported_once_with_the_guards_to_add(factor: float, logged: bool):
    warnings = reports(factor=factor, logged=logged)
    assert [(each["iteration"], each["log_level"]) for each in warnings] == [(2, "warning")]
    assert "NaNGuard()" in warnings[0]["event"]


def test_a_finite_loss_and_a_guarded_one_are_not_reported():
    assert reports(factor=1.0) == []
    assert reports(NaNGuard(), factor=math.nan) == []
    assert reports(factor=1.0, logged=False) == []


@pytest.mark.parametrize("handlers", [(), (NaNGuard(),)], ids=["unguarded", "guarded"])
def test_a_run_that_nobody_listens_to_reads_the_loss_at_log_points_alone(
    handlers: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
):
    read: list[str] = []
    are_finite = Losses.are_finite
    monkeypatch.setattr(Losses, "are_finite", lambda self, reader: (read.append(reader), are_finite(self, reader))[1])
    reports(*handlers, factor=1.0, logged=False)
    assert read.count("log") == (0 if handlers else 12 // 2)
