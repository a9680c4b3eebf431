"""Runs whose checkpoints hold all their state, and the check that none of it is reported as unsaved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import structlog
import torch
from torch.utils.data import DataLoader

from pulsetrain import Checkpointer, Trainer, TrainingConfig, verify
from pulsetrain.engine import Every, SupervisedStrategy
from pulsetrain.handlers import EventRecorder
from tests.support.cases import Make
from tests.support.models import pairs, regression_model
from tests.support.runs import cut_after

ROWS, BATCH, EPOCHS = 20, 4, 3
EVERY, CUT = Every(iterations=4), 9


def run(make: Make, folder: Path) -> Trainer:
    torch.manual_seed(0)
    random.seed(0)
    arguments = make()
    settings = {"max_epochs": EPOCHS, "learning_rate": 0.01, "seed": 1, "device": "cpu", **arguments.pop("config", {})}
    model, data = arguments.pop("model", None), arguments.pop("train_loader", None)
    saver = Checkpointer(
        folder, arguments.pop("every", EVERY), background=arguments.pop("background", False), at_end=False, keep_last=99
    )
    arguments.setdefault("strategy", SupervisedStrategy("mse"))
    arguments["handlers"] = [*arguments.get("handlers", ()), EventRecorder(folder), saver]
    return Trainer(
        regression_model() if model is None else model,
        DataLoader(pairs(ROWS), BATCH, shuffle=True) if data is None else data,
        config=TrainingConfig(**settings),
        **arguments,
    )


OF_OTHER_SUBJECTS = (
    "the loader cannot start at a position",  # of streams
    "the run returns to a checkpoint",
    "not finite",
    "fp16",
    "metrics are computed on",
    "the training data holds random generators of its own",
)


def warnings(logs: list[Any]) -> list[Any]:
    found = [each for each in logs if each["log_level"] in ("warning", "error")]
    return [each for each in found if not any(other in each["event"] for other in OF_OTHER_SUBJECTS)]


def check_that_no_state_is_reported_as_unsaved(make: Make, tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        run(make, tmp_path / "whole").train()
        cut = run(make, tmp_path / "cut")
        cut_after(cut, CUT)
        recorder = next(each for each in cut.handlers if isinstance(each, EventRecorder))
        recorder.detach()  # its log, which the resumed run continues
        changed = cut.checkpoint_state()["unsaved"]["changed"]
        assert changed == [], changed
        again = run(make, tmp_path / "cut")
        again.train(resume="latest")
        changed = again.checkpoint_state()["unsaved"]["changed"]
        assert changed == [], changed
        proof = verify(tmp_path / "whole", lambda folder: run(make, folder), from_iteration=5)
    found = warnings(logs)
    assert found == [], found
    assert proof, str(proof)
