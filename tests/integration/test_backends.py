"""A run is recorded, replayed and resumed in the same way on every backend."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pulsetrain import Trainer
from pulsetrain.engine import Events, Every
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import CSVLogger, EarlyStopping, EventRecorder, JSONLinesLogger, LRScheduler
from tests.faults.everything import logged, table
from tests.support.runs import cut_after
from tests.support.runs_backends import BACKENDS, PATIENCE, TORCH, On, make, programs_kept, saved, whole_state

Whole = Callable[[On], tuple[Trainer, Path]]


@pytest.fixture(autouse=True, scope="module")
def _programs() -> Iterator[None]:
    with programs_kept():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A backend's uninterrupted run, and its folder."""

    @cache
    def run(on: On) -> tuple[Trainer, Path]:
        folder = tmp_path_factory.mktemp(on.name)
        trainer = make(on, folder, *loggers(folder))
        trainer.train()
        return trainer, folder

    return run


def loggers(folder: Path) -> list[Any]:
    return [CSVLogger(folder), JSONLinesLogger(folder)]


def of(trainer: Trainer, kind: type) -> Any:
    """Its only handler of that type."""
    (found,) = (handler for handler in trainer.handlers if isinstance(handler, kind))
    return found


def shape_of(value: Any) -> Any:
    """Names and types without numbers, which differ between backends."""
    if isinstance(value, dict):
        return {name: shape_of(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape_of(item) for item in value]
    return type(value).__name__


# ------------------------------------------------------------------------------------------------------ recording


def recorded(folder: Path) -> list[Any]:
    """Everything about the events that does not depend on computed numbers."""
    return [
        (each.engine, each.event, each.epoch, each.iteration, each.ord, each.lr, *map(shape_of, payloads(each)))
        for each in EventLog(folder).read()
        if each.event != "checkpoint_saved"  # a new best one is saved once more
    ]


def payloads(event: Any) -> tuple[Any, ...]:
    return event.payload, event.output, event.metrics


@pytest.mark.parametrize("on", BACKENDS[1:])
def test_the_events_are_those_of_torch_in_place(on: On, whole: Whole):
    expected, found = recorded(whole(TORCH)[1]), recorded(whole(on)[1])
    assert found == expected
    assert len(found) > 100


@pytest.mark.parametrize("on", BACKENDS)
def test_the_run_is_whole(on: On, whole: Whole):
    """Otherwise the comparisons would be empty: it learns, saves by its cadence, and early stopping ends it."""
    trainer, folder = whole(on)
    history = trainer.history.get_history()
    assert history["train/loss"][-1] < history["train/loss"][0]
    assert (trainer.state.epoch, trainer.state.iteration, trainer.state.update) == (3, 30, 15)
    assert "val/loss" in trainer.state.stop_reason
    assert all(saved(folder, iteration).exists() for iteration in (5, 10, 15, 20, 25, 30))
    assert not EventLog(folder).damage


# --------------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize("on", BACKENDS)
def test_handlers_do_over_the_recording_what_they_did_in_the_run(on: On, whole: Whole, tmp_path: Path):
    trainer, folder = whole(on)
    replay = Replay(folder, obey_terminate=True)
    stopping, optimizer = EarlyStopping(**PATIENCE), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = LRScheduler(copy.deepcopy(of(trainer, LRScheduler).schedule), optimizer)
    for handler in (stopping, schedule, *loggers(tmp_path)):
        handler.attach(replay)
    state = replay.run()
    assert stopping.state_dict() == of(trainer, EarlyStopping).state_dict()
    assert state.stop_reason == trainer.state.stop_reason
    assert (state.epoch, state.iteration, state.update) == (3, 30, 15)
    assert schedule.state_dict() == of(trainer, LRScheduler).state_dict()
    assert optimizer.param_groups[0]["lr"] == trainer.optimizer.param_groups[0]["lr"]
    for name in ("metrics.csv", "metrics.jsonl"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


# --------------------------------------------------------------------------------------------------------- resume


@pytest.mark.slow
@pytest.mark.parametrize("iteration", [5, 10, 15, 20])
@pytest.mark.parametrize("on", BACKENDS)
def test_a_resumed_run_equals_the_uninterrupted_one(on: On, iteration: int, whole: Whole, tmp_path: Path):
    trainer, folder = whole(on)
    left = tmp_path / "left"  # as a kill leaves it after the run's last event
    shutil.copytree(folder / "events", left / "events")
    shutil.copytree(saved(folder, iteration), saved(left, iteration))
    shutil.copy(folder / "metrics.csv", left)
    shutil.copy(folder / "metrics.jsonl", left)
    torch.manual_seed(999)  # another process
    again = make(on, left, *loggers(left))
    history = again.train(resume="latest")
    check = of(again, EventRecorder).resume_check
    assert (check.difference, check.waiting) == (None, False)
    assert check.agreed > 3 * (30 - iteration)
    assert history == trainer.history.get_history()
    assert whole_state(again) == whole_state(trainer)
    assert dict(logged(left)) == dict(logged(folder))
    assert table(left / "metrics.csv") == table(folder / "metrics.csv")


@pytest.mark.parametrize("on", BACKENDS)
def test_a_failed_run_resumes_from_its_last_epochs_end(on: On, whole: Whole, tmp_path: Path):
    trainer, folder = whole(on)
    cut_after(make(on, tmp_path, *loggers(tmp_path), every=Every(epochs=1)), 13)
    torch.manual_seed(999)
    again = make(on, tmp_path, *loggers(tmp_path), every=Every(epochs=1))
    epochs: list[int] = []
    again.add_event_handler(Events.EPOCH_STARTED, lambda engine: epochs.append(engine.state.epoch))
    again.train(resume="latest")
    assert epochs == [2, 3]
    parts = ("model/", "optimizer/", "stepper/", "reporter/history/", "validation/metrics/", "rng/")
    mine, theirs = whole_state(again), whole_state(trainer)
    assert {path: mine[path] for path in mine if path.startswith(parts)} == {
        path: theirs[path] for path in theirs if path.startswith(parts)
    }
    assert dict(logged(tmp_path)) == dict(logged(folder))
