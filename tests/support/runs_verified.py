"""The run that the tests of `verify` record and run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pulsetrain import Trainer
from pulsetrain.engine import Every
from pulsetrain.handlers import Checkpointer, ConsoleLogger, CSVLogger, EventRecorder, Fingerprints
from tests.support.models import loader, regression_model, trainer

SETTINGS = {"max_epochs": 3, "optimizer": "adamw", "seed": 3, "log_every_n_steps": 5}


def build(
    folder: Path,
    settings: dict[str, Any] | None = None,
    fingerprints: bool = True,
    data: Any = None,
    dropout: float = 0.2,
    grad_norm: bool | None = True,
) -> Trainer:
    marks = [Fingerprints(Every(updates=1), batches=True)] if fingerprints else []
    return trainer(
        {**SETTINGS, **(settings or {})},
        model=regression_model(dropout),
        train_loader=loader() if data is None else data,
        val_loader=loader(shuffle=False),
        handlers=[
            *marks,
            EventRecorder(folder, grad_norm=grad_norm),
            Checkpointer(folder, every=Every(iterations=8), keep_last=20),
            CSVLogger(folder),
            ConsoleLogger(),
        ],
    )
