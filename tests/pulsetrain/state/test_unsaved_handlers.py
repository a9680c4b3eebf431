"""Handlers without a state, and functions that use one, are named at the save that follows a change; handlers with half
of a state at the start.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from ignite.handlers import Timer
from torch import nn
from torch.optim.lr_scheduler import StepLR

from pulsetrain import Trainer
from pulsetrain.engine import CheckpointError, Events, Every
from pulsetrain.handlers import Callback, ConsoleLogger, CSVLogger, EarlyStopping, EventRecorder, Plots, ProgressBar
from tests.support.models import loader, trainer
from tests.support.runs import cut_after, saving_run, warnings_of


class Handler:
    """A user's handler, subscribed by one of its methods."""

    def attach(self, engine: Any) -> Self:
        self.handles = [engine.add_event_handler(Events.ITERATION_COMPLETED, self.look)]
        return self

    def look(self, engine: Any) -> None:
        """Nothing to do."""


class Holding(Handler):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("count", "name", "unset")

    def __init__(self) -> None:
        self.count, self.name = 0, "mine"

    def attach(self, engine: Any) -> Self:
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.look)
        return self

    def look(self, engine: Any) -> None:
        self.count += 1


class Saved(Handler):
    """Has a state of any type."""

    def __init__(self, state: Any) -> None:
        self.state, self.calls = state, 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Changing(Handler):
    """Has an attribute that a function changes at each iteration."""

    def __init__(self, value: Any, change: Callable[[Any], Any]) -> None:
        self.seen, self.change, self.name = value, change, "mine"

    def look(self, engine: Any) -> None:
        changed = self.change(self.seen)
        self.seen = self.seen if changed is None else changed


class OnlySaves(Handler):
    def state_dict(self) -> dict[str, Any]:
        return {}


class OnlyLoads(Handler):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


class Counting(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, trainer: Any, loss: Any) -> None:
        self.steps += 1


class SavedCounting(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Called(SavedCounting):
    """Subscribed as a callable."""

    def __call__(self, engine: Any) -> None:
        self.steps += 1


def named(warnings: list[dict[str, Any]]) -> list[str]:
    """What the checkpoints of a run were said to lack."""
    return [name for each in warnings if "are in no checkpoint" in each["event"] for name in each["attributes"]]


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (0, lambda value: value + 1),
        (0.0, lambda value: value + 0.5),
        (False, lambda value: True),
        (None, lambda value: "text"),
        ([], lambda value: value.append(1)),
        ({}, lambda value: value.update(a=1)),
        ({"a": {"b": 1}}, lambda value: value["a"].update(b=2)),
        (set(), lambda value: value.add(1)),
        (deque([1, 2, 3]), lambda value: value.rotate()),
        (Counter(), lambda value: value.update("a")),
        (np.zeros(2), lambda value: value.__iadd__(1)),
        (torch.zeros(2), lambda value: value.add_(1)),
        ([torch.zeros(2)], lambda value: (value[0].add_(1), None)[1]),
        (Slotted(), lambda value: setattr(value, "count", value.count + 1)),
    ],
    ids=lambda value: type(value).__name__ if not callable(value) else "",
)
def test_a_handler_that_changes_and_has_no_state_is_named_once(value: Any, change: Any, tmp_path: Path):
    assert named(warnings_of(saving_run(tmp_path, Changing(value, change), epochs=3))) == ["handler Changing.seen"]


@pytest.mark.parametrize("value", [0, float("nan"), [1], {"a": [1.0]}, np.zeros(2), torch.zeros(2), object()])
def test_a_handler_that_does_not_change_is_not_named(value: Any, tmp_path: Path):
    assert warnings_of(saving_run(tmp_path, Holding(seen=value, name="mine", best=None), epochs=2)) == []


def test_what_is_too_deep_is_in_the_manifest(tmp_path: Path):
    saving_run(tmp_path, Holding(deep=[[[1]]], many=list(range(20_000)), seen=[[1]])).train()
    (manifest,) = (tmp_path / "checkpoints").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["unsaved"] == {"not_seen": ["handler Holding.deep", "handler Holding.many"]}


def test_the_warning_says_what_to_do(tmp_path: Path):
    (warning,) = warnings_of(saving_run(tmp_path, Changing(1, lambda value: value + 1)))
    assert "in state_dict() and load_state_dict()" in warning["event"]


def test_attributes_in_slots_are_seen(tmp_path: Path):
    assert named(warnings_of(saving_run(tmp_path, Slotted()))) == ["handler Slotted.count"]


def test_callbacks_and_objects_subscribed_by_a_method_or_as_a_callable_are_seen(tmp_path: Path):
    class Called(Counting):
        def __call__(self, engine: Any) -> None:
            self.steps += 1

    class Later(Changing):
        """Another class."""

    run = saving_run(tmp_path, callbacks=[Counting()])
    run.add_event_handler(Events.ITERATION_COMPLETED, Changing(1, lambda value: value + 1).look)
    run.add_event_handler(Events.ITERATION_COMPLETED, partial(Later(1, lambda value: value + 1).look))
    run.add_event_handler(Events.ITERATION_COMPLETED, Called())
    names = ["Called.steps", "Changing.seen", "Counting.steps", "Later.seen"]
    assert named(warnings_of(run)) == [f"handler {name}" for name in names]


@pytest.mark.parametrize(
    "handler", [Handler(), Holding(name="mine", best=None, model=torch.nn.Linear(1, 1)), Saved({})]
)
def test_a_handler_that_holds_nothing_or_has_a_state_is_not_warned_of(handler: Any, tmp_path: Path):
    assert warnings_of(saving_run(tmp_path, handler)) == []


def test_functions_builtins_and_libraries_are_not_warned_of(tmp_path: Path):
    run = saving_run(tmp_path)
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: None)
    run.add_event_handler(Events.EPOCH_COMPLETED, id)
    run.add_event_handler(Events.EPOCH_COMPLETED, Holding)
    run.add_event_handler(Events.EPOCH_COMPLETED, Timer().pause)
    assert warnings_of(run) == []


@pytest.mark.slow
def test_our_own_handlers_are_not_warned_of(tmp_path: Path):
    handlers = [
        ConsoleLogger(),
        CSVLogger(tmp_path / "t.csv"),
        EventRecorder(tmp_path / "e.jsonl"),
        Plots(tmp_path),
        ProgressBar(),
    ]
    run = saving_run(tmp_path / "run", EarlyStopping(patience=9), *handlers, val_loader=loader(8))
    assert warnings_of(run) == []


def test_without_a_checkpointer_nothing_is_said(tmp_path: Path):
    changing = Changing(1, lambda value: value + 1)
    run = trainer({"max_iterations": 3}, train_loader=iter(loader()), handlers=[changing, OnlySaves()])
    assert warnings_of(run) == []
    assert warnings_of(saving_run(None, Saved({"x": object()}))) == []


@pytest.mark.parametrize(
    ("handler", "there", "lacking"),
    [(OnlySaves(), "state_dict", "load_state_dict"), (OnlyLoads(), "load_state_dict", "state_dict")],
)
def test_half_a_state_is_reported(handler: Any, there: str, lacking: str, tmp_path: Path):
    (warning,) = warnings_of(saving_run(tmp_path, handler))
    assert warning["handler"] == type(handler).__name__
    assert f"has {there}() and no {lacking}()" in warning["event"]


# --------------------------------------------------------------------------------- states that cannot be saved


def test_a_state_that_no_checkpoint_can_hold_ends_the_run_before_its_first_batch(tmp_path: Path):
    handler = Saved({"inside": [object()]})
    run = saving_run(tmp_path, handler)
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint\['handlers'\]\['Saved'\]\['state'\]\['inside'\]\[0\]: builtins.object|object",
    ):
        run.train()
    assert run.state.iteration == 0
    with pytest.raises(CheckpointError) as at_start:
        run.train()
    assert run.state.iteration == 0
    assert str(at_start.value).startswith(
        "checkpoint['handlers']['Saved']['state']['inside'][0]: object: could not be loaded"
    )
    with pytest.raises(CheckpointError) as at_save:
        run.save_checkpoint()
    assert str(at_save.value) == str(at_start.value)


def test_a_state_dict_that_raises_is_named(tmp_path: Path):
    class Failing(Saved):
        def state_dict(self) -> Any:
            raise ZeroDivisionError(self.state["x"])

    run = saving_run(tmp_path)
    Failing({"x": 1}).attach(run)
    with pytest.raises(ZeroDivisionError) as caught:
        run.train()
    assert run.state.iteration == 0
    assert any("Failing.state_dict()" in note for note in caught.value.__notes__)


# ----------------------------------------------------------------------------------------- saved state


@pytest.mark.parametrize("callback", [True, False], ids=["a callback", "a callable"])
def test_a_callback_and_a_callable_with_a_state_are_resumed(callback: bool, tmp_path: Path):
    def counted() -> tuple[Trainer, SavedCounting]:
        counting = SavedCounting() if callback else Called()
        run = saving_run(tmp_path, epochs=2, every=Every(iterations=1), callbacks=[counting] if callback else [])
        if not callback:
            run.add_event_handler(Events.ITERATION_COMPLETED, counting)
        return run, counting

    run, _ = counted()
    cut_after(run, 13)
    again, counting = counted()
    again.train(resume="latest")
    assert counting.steps == 20


def test_a_handler_with_slots_and_a_state_is_resumed(tmp_path: Path):
    class Keeping(Slotted):
        __slots__ = ()

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    cut_after(saving_run(tmp_path, Keeping(), epochs=2, every=Every(iterations=1)), 13)
    handler = Keeping()
    saving_run(tmp_path, handler, epochs=2).train(resume="latest")
    assert handler.count == 20


# ----------------------------------------------------------------------------------- what functions reach


def reached(run: Trainer) -> list[str]:
    return [name.rpartition(".")[2] for name in named(warnings_of(run))]


def test_what_a_function_reaches_and_changes_is_named(tmp_path: Path):
    run = saving_run(tmp_path)
    scheduler, helped = StepLR(run.optimizer, 2), StepLR(run.optimizer, 3)
    stepped = StepLR(run.optimizer, 4)
    step = stepped.step
    seen: dict[str, int] = {}

    def help_step() -> None:
        helped.step()

    def listens(engine: Any, counting: Any = SavedCounting()) -> None:  # noqa: B008
        counting.on_step_end(None, None)

    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: scheduler.step())
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: step())
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: help_step())
    run.add_event_handler(Events.EPOCH_COMPLETED, listens)
    run.add_event_handler(Events.EPOCH_COMPLETED, partial(lambda kept: kept.update(a=1), seen))
    found = reached(run)
    assert sorted(found) == sorted(["scheduler", "step", "help_step", "counting", "0"])


at_module_level = SavedCounting()


def test_a_variable_of_its_module_that_a_function_names_is_seen(tmp_path: Path):
    run = saving_run(tmp_path)
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: at_module_level.on_step_end(None, None))
    assert reached(run) == ["at_module_level"]


def test_what_is_saved_otherwise_may_be_reached(tmp_path: Path):
    handler, callback = Saved({}), SavedCounting()
    run = saving_run(tmp_path, handler, callbacks=[callback], val_loader=loader(8))
    scheduler, teacher = StepLR(run.optimizer, 2), nn.Linear(1, 1).requires_grad_(False)
    other = trainer()
    run.add_event_handler(Events.EPOCH_COMPLETED, scheduler.step)
    for each in (run, handler, callback, scheduler, teacher, other, run.model, run.model[0], run.optimizer, Saved):
        run.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, event, each=each: each)
    parameters = list(run.model.parameters())
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: (run.evaluator, run.train_loader, run.history, parameters))
    assert reached(run) == []


def test_without_a_checkpointer_no_function_is_looked_into(tmp_path: Path):
    run = saving_run(None)
    scheduler = StepLR(run.optimizer, 2)
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: scheduler.step())
    assert warnings_of(run) == []
