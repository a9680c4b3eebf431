"""What a run says about its losses without being asked."""

from __future__ import annotations

import math

import pytest
import structlog
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, SupervisedStrategy
from pulsetrain.handlers import NaNGuard


def warnings_of(*handlers: object, target: float) -> list[dict[str, object]]:
    """What a run of 12 iterations over this target warns about."""
    trainer = Trainer(
        nn.Linear(1, 1),
        [(torch.ones(1, 1), torch.full((1, 1), target))] * 4,
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_epochs=3, log_every_n_steps=2),
        handlers=handlers,
    )
    trainer.add_event_handler(Events.METRICS_LOGGED, lambda: None)
    with structlog.testing.capture_logs() as logs:
        trainer.train()
    return [entry for entry in logs if "finite" in str(entry["event"])]


@pytest.mark.parametrize("target", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_reported_once_with_the_guards_to_add(target: float):
    (warning,) = warnings_of(target=target)
    assert (warning["iteration"], warning["log_level"]) == (2, "warning")
    assert "NaNGuard()" in str(warning["event"])


def test_a_finite_loss_and_a_guarded_one_are_not_reported():
    assert warnings_of(target=1.0) == []
    assert not [
        entry for entry in warnings_of(NaNGuard(), target=math.nan) if "no handler guards" in str(entry["event"])
    ]
