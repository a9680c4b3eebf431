"""A run warns at its start about what a checkpoint cannot capture: handlers without a state or with half of one, and
state that functions use.
"""

from __future__ import annotations

from collections import Counter, deque
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


def named(warnings: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    return [
        (each["handler"], each["attributes"]) for each in warnings if "attributes that may be progress" in each["event"]
    ]


@pytest.mark.parametrize(
    "value",
    [0, 0.0, False, [], {}, set(), deque(), Counter(), np.zeros(2), torch.zeros(2)],
    ids=lambda v: type(v).__name__,
)
def test_a_handler_with_possible_progress_and_no_state_is_named_once(value: Any, tmp_path: Path):
    assert named(warnings_of(saving_run(tmp_path, Holding(seen=value, name="mine", best=None), epochs=3))) == [
        ("Holding", ["seen"])
    ]


def test_the_warning_says_what_to_do(tmp_path: Path):
    (warning,) = warnings_of(saving_run(tmp_path, Holding(seen=1)))
    assert "give it state_dict() and load_state_dict()" in warning["event"]
    assert "may return {} if there is nothing to keep" in warning["event"]


def test_attributes_in_slots_are_seen(tmp_path: Path):
    assert named(warnings_of(saving_run(tmp_path, Slotted()))) == [("Slotted", ["count"])]


def test_callbacks_and_objects_subscribed_by_a_method_or_as_a_callable_are_seen(tmp_path: Path):
    class Called(Counting):
        def __call__(self, engine: Any) -> None:
            self.steps += 1

    run = saving_run(tmp_path, callbacks=[Counting()])
    run.add_event_handler(Events.ITERATION_COMPLETED, Holding(seen=1).look)
    run.add_event_handler(Events.ITERATION_COMPLETED, partial(Holding(later=1).look))
    run.add_event_handler(Events.EPOCH_COMPLETED, Called())
    names = [("Counting", ["steps"]), ("Holding", ["seen"]), ("Holding", ["later"]), ("Called", ["steps"])]
    assert named(warnings_of(run)) == names


def test_settings_are_not_progress(tmp_path: Path):
    class Configured(Handler):
        def __init__(self, length: int = 3, scale: float = 2.0) -> None:
            self.length, self._scale, self.done = length, scale, 0

    assert named(warnings_of(saving_run(tmp_path, Configured()))) == [("Configured", ["done"])]


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
    run = trainer({"max_iterations": 3}, train_loader=iter(loader()), handlers=[Holding(seen=1), OnlySaves()])
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
    return [each["object"] for each in warnings_of(run) if "a function that subscribes uses" in each["event"]]


def test_a_function_that_reaches_an_unsaved_state_is_reported_once(tmp_path: Path):
    run = saving_run(tmp_path)
    scheduler = StepLR(run.optimizer, 2)
    step = scheduler.step
    helped = StepLR(run.optimizer, 3)

    def help_step() -> None:
        helped.step()

    def listens(engine: Any, counting: Any = SavedCounting()) -> None:  # noqa: B008
        help_step()

    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: scheduler.step())
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: step())
    run.add_event_handler(Events.EPOCH_COMPLETED, listens)
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, other: None, torch.optim.SGD([torch.zeros(1)], lr=1.0))
    run.add_event_handler(Events.EPOCH_COMPLETED, partial(lambda kept: None, torch.amp.GradScaler("cpu")))
    assert sorted(reached(run)) == ["GradScaler", "SGD", "SavedCounting", "StepLR", "StepLR"]


at_module_level = SavedCounting()


def test_a_variable_of_its_module_that_a_function_names_is_seen(tmp_path: Path):
    run = saving_run(tmp_path)
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: at_module_level.on_step_end(None, None))
    assert reached(run) == ["SavedCounting"]


def test_what_is_saved_otherwise_or_needs_no_saving_may_be_reached(tmp_path: Path):
    handler, callback = Saved({}), SavedCounting()
    run = saving_run(tmp_path, handler, callbacks=[callback], val_loader=loader(8))
    scheduler, teacher = StepLR(run.optimizer, 2), nn.Linear(1, 1).requires_grad_(False)
    other = trainer()
    run.add_event_handler(Events.EPOCH_COMPLETED, scheduler.step)
    for each in (run, handler, callback, scheduler, teacher, other, run.model, run.model[0], run.optimizer, Saved):
        run.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, event, each=each: each)
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: (run.evaluator, run.train_loader, run.history))
    assert reached(run) == []


def test_without_a_checkpointer_no_function_is_looked_into(tmp_path: Path):
    run = saving_run(None)
    scheduler = StepLR(run.optimizer, 2)
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: scheduler.step())
    assert warnings_of(run) == []
