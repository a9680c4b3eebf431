"""Runs that are cut off, and what they are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pulsetrain import Trainer
from pulsetrain.engine import Events, Every
from pulsetrain.handlers import Checkpointer, EarlyStopping
from tests.support.small import loader, regression_model, trainer

CONFIG = {
    "max_epochs": 4,
    "optimizer": "adamw",
    "accumulate": 3,
    "clip_grad_norm": 1.0,
    "schedule": "cosine",
    "warmup_steps": 3,
    "seed": 7,
}


class PlugPulled(Exception):  # noqa: N818
    """The plug is pulled."""


def make(folder: Path, *, every: Every | None = None, config: dict[str, Any] | None = None) -> Trainer:
    return trainer(
        {**CONFIG, **(config or {})},
        model=regression_model(dropout=0.3),
        train_loader=loader(),
        val_loader=loader(12, shuffle=False),
        handlers=[
            Checkpointer(folder, every=every or Every(iterations=1), metric="val/loss", keep_last=100, at_end=False),
            EarlyStopping(patience=50),
        ],
    )


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def cut_after(run: Trainer, iteration: int) -> None:
    @run.on(Events.ITERATION_COMPLETED, phase=3)
    def pull(engine: Trainer) -> None:
        if engine.state.iteration == iteration:
            raise PlugPulled

    with pytest.raises(PlugPulled):
        run.train()
