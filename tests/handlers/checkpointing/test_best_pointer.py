"""`get_best` gives the checkpoint that the ranking has first, however the run came there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pulsetrain import Checkpointer, Every, Trainer
from pulsetrain.engine import Engine, Events
from pulsetrain.engine.checkpoint.manifest import BEST
from pulsetrain.engine.checkpoint.reader import step_of
from tests.support.models import loader, trainer


class Given:
    """A metric with given values, one for each validation."""

    def __init__(self, *values: float) -> None:
        self.values = iter(values)

    def reset(self) -> None: ...

    def update(self, outputs: Any, targets: Any) -> None: ...

    def compute(self) -> float:
        return next(self.values)


def make(folder: Path, *values: float) -> tuple[Trainer, Checkpointer, list[bool]]:
    """A run with these values of its validations; at each save, whether the pointer followed the ranking."""
    saver = Checkpointer(folder, every=Every(epochs=1), keep_last=9, metric="val/score", mode="max")
    followed: list[bool] = []

    def look(engine: Engine) -> None:
        best = saver.manager.get_best()
        followed.append(best is not None and best.name == saver.best[0][1])

    options = {"max_epochs": 3, "seed": 0}
    made = trainer(options, val_loader=loader(8), metrics={"score": Given(*values)}, handlers=[saver])
    made.add_event_handler(Events.CHECKPOINT_SAVED | Events.CHECKPOINT_LOADED, look)
    return made, saver, followed


def test_a_run_that_resumes_from_an_older_checkpoint_has_the_best_of_its_own_line(tmp_path: Path):
    first, saver, followed = make(tmp_path, 0.5, 0.9, 0.7)
    first.train()
    assert followed == [True, True, True]
    older = min(saver.manager.valid(), key=step_of)
    run, saver, followed = make(tmp_path, 0.6, 0.8)
    run.train(resume=older)
    assert followed == [True, True, True]
    assert saver.best[0][0] == 0.8


def test_a_pointer_that_could_not_be_written_is_written_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, saver, followed = make(tmp_path, 0.5, 0.9, 0.7)
    replace, pointers = os.replace, []

    def full_once(source: Path, target: Path) -> None:
        if target.name == BEST:
            pointers.append(target)
            if len(pointers) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full_once)
    with capture_logs() as logs:
        run.train()
    best = saver.manager.get_best()
    assert best is not None
    assert step_of(best) == 20  # where the metric was 0.9
    assert followed == [True, False, True]
    assert len([each for each in logs if "pointer to the best" in each["event"]]) == 1
