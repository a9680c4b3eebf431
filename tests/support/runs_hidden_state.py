"""Runs with state outside of state dicts, and the check that it is resumed or named as missing.

Each is interrupted in the third epoch; a handler may change something once, after the second one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch.utils.data import DataLoader

from pulsetrain import Checkpointer, Trainer, TrainingConfig
from pulsetrain.engine import CheckpointError, Events, Every, SupervisedStrategy
from tests.support.cases import Cases, Make
from tests.support.models import pairs, regression_model
from tests.support.runs import cut_after, weights

ROWS, BATCH, EPOCHS = 20, 4, 4
CUT, SAVED = 13, 12  # in the third epoch; handlers act once, after the second one


class CasesOfHiddenState(Cases):
    def case(self, *lacks: str, slow: bool = False, marks: Sequence[Any] = ()) -> Callable[[Make], Make]:
        """A run whose checkpoint is said to lack this; nothing if it resumes exactly.

        The function makes the arguments of a Trainer, and `act`, what a handler does once, after the second epoch.
        """
        return self.add(*marks, *([pytest.mark.slow] if slow else []), values=(lacks,))


def run(folder: Path, make: Make) -> Trainer:
    torch.manual_seed(0)
    arguments = make()
    actions = {
        Events.STARTED: arguments.pop("start", None),
        Events.EPOCH_COMPLETED(once=2): arguments.pop("act", None),
        Events.ITERATION_STARTED: arguments.pop("always", None),
    }
    attach = arguments.pop("attached", None)
    model = arguments.pop("model", None) or regression_model()
    data = arguments.pop("train_loader", None)
    data = DataLoader(pairs(ROWS), BATCH, shuffle=True) if data is None else data
    arguments.setdefault("optimizer", "adamw")
    arguments.setdefault("strategy", SupervisedStrategy("mse"))
    config = TrainingConfig(max_epochs=EPOCHS, learning_rate=0.05, seed=1)
    saver = Checkpointer(folder, Every(iterations=SAVED), at_end=False)
    kind = arguments.pop("kind", Trainer)
    given = arguments.pop("given", [])
    made = kind(model, data, config=config, handlers=[saver, *given], **arguments)
    for event, action in actions.items():
        if action is not None:
            made.add_event_handler(event, action)
    if attach is not None:
        attach(made)
    return made


def warned(logs: list[Any], what: str) -> list[str]:
    return [name for each in logs if what in each["event"] for name in each.get("attributes", ())]


def check_that_what_has_changed_is_resumed_or_named(make: Make, lacks: tuple[str, ...], tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", make)
    whole.train()
    with structlog.testing.capture_logs() as saving:
        cut_after(run(tmp_path / "cut", make), CUT)
    manifest = json.loads((tmp_path / f"cut/checkpoints/{SAVED:09d}-checkpoint/manifest.json").read_text())
    again = run(tmp_path / "cut", make)
    with structlog.testing.capture_logs() as resuming:
        try:
            again.train(resume="latest")
        except CheckpointError as error:
            resuming.append({"event": "the checkpoint lacks state", "attributes": [str(error)]})
    expected, found = weights(whole), weights(again)
    if not lacks:
        differ = [name for name in expected if not torch.equal(expected[name], found.get(name, torch.ones(0)))]
        assert differ == [], differ
        assert not warned(saving, "are in no checkpoint"), saving
        assert not warned(resuming, "the checkpoint lacks state"), resuming
        assert "unsaved" not in manifest, manifest["unsaved"]
        return
    assert set(lacks) <= set(warned(saving, "are in no checkpoint")), saving
    assert len(set(warned(saving, "are in no checkpoint"))) == len(warned(saving, "are in no checkpoint")), saving
    assert set(lacks) <= set(manifest["unsaved"]["changed"]), manifest["unsaved"]
    resumed = warned(resuming, "the checkpoint lacks state")
    refused = any("unexpected: 0.adapter" in each and "that handlers have added" in each for each in resumed)
    assert refused or set(lacks) <= set(resumed), resuming
