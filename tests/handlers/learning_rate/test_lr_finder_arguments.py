"""Loaders and arguments that a range test accepts or rejects."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsetrain import Loop
from pulsetrain.engine import Engine, EventBus
from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EventRecorder, LRFinder
from tests.support.models import loader, regression_model, trainer

SWEEP = {"start_lr": 1e-5, "end_lr": 1.0, "iterations": 20}


def test_another_loader_may_be_given():
    run = trainer({"device": "cpu"}, train_loader=iter(loader()))
    with pytest.raises(ValueError, match=r"train_loader=\w+: it can be read only once, .*; pass loader="):
        LRFinder(**SWEEP).run(run)
    assert len(LRFinder(**SWEEP).run(run, loader=loader()).rates) > 10
    assert len(list(run.train_loader)) == 10


def test_a_loader_that_cannot_be_copied_is_refused(tmp_path: Path):
    class Reading:
        def __init__(self) -> None:
            self.file = (tmp_path / "data").open("w")

        def __iter__(self) -> Iterator[Any]:
            return iter(loader())

    data = Reading()
    with pytest.raises(ValueError, match=r"train_loader=Reading: it cannot be copied .*; pass loader="):
        LRFinder(**SWEEP).run(trainer({"device": "cpu"}, train_loader=data))
    data.file.close()


def test_data_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="train_loader=list: gives no batch"):
        LRFinder(**SWEEP).run(trainer({"device": "cpu"}), loader=[])


def test_what_is_not_a_trainer_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match=r"LRFinder\(Engine\): needs a pulsetrain.Trainer; .* no model, .*, stepper"):
        LRFinder().run(Engine(lambda engine, batch: None))
    with pytest.raises(TypeError, match="LRFinder"):
        LRFinder().attach(EventBus())
    loop = Loop(regression_model(), loader())
    with pytest.raises(ValueError, match="the step of Loop is the loop's body"):
        LRFinder().run(loop)
    trainer({"max_epochs": 1}, handlers=[EventRecorder(tmp_path)]).train()
    replay = Replay(tmp_path)
    with pytest.raises(RecordingError):
        LRFinder().attach(replay)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start_lr": 0.0}, r"LRFinder\(start_lr=0.0\): needs a positive number"),
        ({"start_lr": "1e-3"}, r"LRFinder\(start_lr='1e-3'\): needs"),
        ({"end_lr": math.inf}, r"LRFinder\(end_lr=inf\): needs"),
        ({"start_lr": 1.0, "end_lr": 1.0}, r"LRFinder\(start_lr=1.0\): needs to be below end_lr=1.0"),
        ({"iterations": 19}, r"LRFinder\(iterations=19\): needs a whole number of at least 20"),
        ({"iterations": 50.0}, r"LRFinder\(iterations=50.0\): needs"),
        ({"smoothing": 1.0}, r"LRFinder\(smoothing=1.0\): needs a number of at least 0 and below 1"),
        ({"diverge": 1.0}, r"LRFinder\(diverge=1.0\): needs a number above 1"),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LRFinder(**arguments)
