"""State in places that a run reaches only through something else: the library's own objects that users hold, filters,
classes and modules as holders of values, metrics, and the variables of a loop written by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pulsetrain import Checkpointer, Every, Loop, Trainer, TrainingConfig
from pulsetrain.engine import Events
from pulsetrain.engine.metrics import RunningMean
from pulsetrain.handlers import Callback, EarlyStopping
from tests.support.cases import Make
from tests.support.models import loader, regression_model
from tests.support.runs_hidden_state import CasesOfHiddenState, check_that_what_has_changed_is_resumed_or_named, warned

CASES = CasesOfHiddenState()
case = CASES.case

settings = ModuleType("settings_of_a_project")  # a module of the user's
settings.level = 1.0
sys.modules[settings.__name__] = settings


def slow_down(engine: Any, number: float) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.05 / (1 + number % 3)


class Patience(Callback):
    def __init__(self) -> None:
        self.stopping = EarlyStopping(patience=99, mode="min")

    def on_epoch_end(self, trainer: Any, *_: object) -> None:
        self.stopping.step(1.0)
        slow_down(trainer, self.stopping.counter)


@case("handler Patience.stopping")
def a_callback_holds_an_early_stopping() -> dict[str, Any]:
    return {"callbacks": [Patience()]}


@case(f"handler {__name__}.a_handler_holds_a_running_mean.<locals>.attach.<locals>.add.mean")
def a_handler_holds_a_running_mean() -> dict[str, Any]:
    def attach(engine: Any) -> None:
        mean = RunningMean()

        @engine.on(Events.ITERATION_STARTED)
        def add() -> None:
            mean.update(torch.tensor(float(engine.state.iteration)))
            slow_down(engine, float(mean.compute()))

    return {"attached": attach}


@case(f"handler {__name__}.a_filter_counts_in_its_closure.<locals>.attach.<locals>.decay: filter.seen")
def a_filter_counts_in_its_closure() -> dict[str, Any]:
    def attach(engine: Any) -> None:
        seen: list[int] = []

        def sometimes(engine: Any, count: int) -> bool:
            seen.append(count)
            return len(seen) % 7 == 0

        @engine.on(Events.ITERATION_STARTED(event_filter=sometimes))
        def decay() -> None:
            engine.optimizer.param_groups[0]["lr"] *= 0.5

    return {"attached": attach}


class Progress:
    epochs = 0


def count_epochs() -> None:
    Progress.epochs += 1


@case(f"handler {__name__}.count_epochs.Progress.epochs")
def a_class_holds_a_number() -> dict[str, Any]:
    Progress.epochs = 0

    def attach(engine: Any) -> None:
        engine.add_event_handler(Events.EPOCH_COMPLETED, count_epochs)
        engine.add_event_handler(Events.ITERATION_STARTED, lambda: slow_down(engine, Progress.epochs))

    return {"attached": attach}


def raise_level() -> None:
    settings.level += 1


@case(f"handler {__name__}.raise_level.settings.level", slow=True)
def a_module_holds_a_number() -> dict[str, Any]:
    settings.level = 1.0

    def attach(engine: Any) -> None:
        engine.add_event_handler(Events.EPOCH_COMPLETED, raise_level)
        engine.add_event_handler(Events.ITERATION_STARTED, lambda: slow_down(engine, settings.level))

    return {"attached": attach}


class Counting:
    """A handler that keeps its state, and a number elsewhere."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        engine.add_event_handler(Events.EPOCH_COMPLETED, self.count)

    def count(self) -> None:
        Progress.epochs += 1
        slow_down(self.engine, Progress.epochs)

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@case("handler Counting: Progress.epochs", slow=True)
def a_method_of_a_handler_counts_in_a_class() -> dict[str, Any]:
    Progress.epochs = 0
    return {"attached": Counting}


class OfClass(Trainer):
    factor = 1.0


@case("trainer.factor", slow=True)
def an_attribute_of_the_trainers_class_is_set() -> dict[str, Any]:
    OfClass.factor = 1.0

    def attach(engine: Any) -> None:
        @engine.on(Events.EPOCH_COMPLETED)
        def double() -> None:
            type(engine).factor *= 2
            slow_down(engine, type(engine).factor)

    return {"attached": attach, "kind": OfClass}


class Scheduling:
    """A handler whose part subscribes, and is not saved with it."""

    def attach(self, engine: Any) -> None:
        self.scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 4, 0.5)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.scheduler.step)


@case("handler Scheduling.scheduler")
def a_part_of_a_handler_subscribes() -> dict[str, Any]:
    return {"given": [Scheduling()]}


class Config:
    class Rates:
        level = 1.0


def raise_nested_level() -> None:
    def inside() -> None:
        Config.Rates.level += 1

    inside()


@case(f"handler {__name__}.raise_nested_level.Config.Rates.level", slow=True)
def a_class_inside_a_class_holds_a_number() -> dict[str, Any]:
    Config.Rates.level = 1.0

    def attach(engine: Any) -> None:
        engine.add_event_handler(Events.EPOCH_COMPLETED, raise_nested_level)
        engine.add_event_handler(Events.ITERATION_STARTED, lambda: slow_down(engine, Config.Rates.level))

    return {"attached": attach}


@pytest.mark.parametrize(("make", "lacks"), CASES)
def test_what_has_changed_is_resumed_or_named(make: Make, lacks: tuple[str, ...], tmp_path: Path):
    check_that_what_has_changed_is_resumed_or_named(make, lacks, tmp_path)


def loop_with(
    folder: Path, kind: str, cut: int | None = None, resume: str | None = None, *, saved: bool = False
) -> Any:
    """Train by hand with a scheduler or an average among the loop's variables; returns the weights at the end."""
    torch.manual_seed(0)
    model: nn.Module = regression_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = TrainingConfig(max_epochs=3, seed=0, schedule=None)
    saver = Checkpointer(folder, Every(iterations=10), at_end=False)
    loop = Loop(model, loader(), optimizer=optimizer, config=config, handlers=[saver])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.3) if kind == "scheduler" else None
    average = AveragedModel(model) if kind == "average" else None
    if saved and scheduler is not None:
        loop.add_event_handler(Events.OPTIMIZER_STEP_COMPLETED, scheduler.step)
    for inputs, targets in loop.batches(resume=resume):
        loop.output = loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None and not saved:
            scheduler.step()
        if average is not None:
            average.update_parameters(model)
        if loop.state.iteration == cut:
            break
    return [value.clone() for value in (average or model).state_dict().values()]


@pytest.mark.parametrize("kind", ["scheduler", "average"])
def test_the_variables_of_a_loop_are_named(kind: str, tmp_path: Path):
    whole = loop_with(tmp_path / "whole", kind)
    with capture_logs() as saving:
        loop_with(tmp_path / "cut", kind, cut=13)
    with capture_logs() as resuming:
        again = loop_with(tmp_path / "cut", kind, resume="latest")
    assert not all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
    assert warned(saving, "are in no checkpoint") == [f"variable {kind} of the loop"]
    assert warned(resuming, "the checkpoint lacks state") == [f"variable {kind} of the loop"]


def test_a_scheduler_that_subscribes_is_saved(tmp_path: Path):
    whole = loop_with(tmp_path / "whole", "scheduler", saved=True)
    with capture_logs() as saving:
        loop_with(tmp_path / "cut", "scheduler", cut=13, saved=True)
    again = loop_with(tmp_path / "cut", "scheduler", resume="latest", saved=True)
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
    assert warned(saving, "are in no checkpoint") == []


def test_a_loop_without_such_variables_is_not_warned_of(tmp_path: Path):
    with capture_logs() as saving:
        loop_with(tmp_path, "none")
    assert warned(saving, "are in no checkpoint") == []
