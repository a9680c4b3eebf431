"""Runs that save checkpoints where they are given a folder, and the warnings that they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from pulsetrain import Trainer
from pulsetrain.engine import Every
from pulsetrain.handlers import Checkpointer
from tests.support.small import trainer


def make(folder: Path | None, *handlers: Any, epochs: int = 1, every: Every | None = None, **arguments: Any) -> Trainer:
    saving = [] if folder is None else [Checkpointer(folder, every=every, at_end=False)]
    return trainer({"max_epochs": epochs, "seed": 1}, handlers=[*saving, *handlers], **arguments)


def told(run: Trainer) -> list[dict[str, Any]]:
    """The warnings of a run, without their level."""
    with structlog.testing.capture_logs() as logs:
        run.train()
    return [{k: v for k, v in entry.items() if k != "log_level"} for entry in logs if entry["log_level"] == "warning"]
