"""State of whatever hears a run: on the evaluator, on every engine of the bus, as a receiver of blinker, a class method
or a method of a list. It is saved if it can be, or else named.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ignite.handlers import EarlyStopping

from pulsetrain.engine import Events
from tests.support.cases import Make
from tests.support.models import loader
from tests.support.runs_hidden_state import CasesOfHiddenState, check_that_what_has_changed_is_resumed_or_named

CASES = CasesOfHiddenState()
case = CASES.case

HERE = f"handler {__name__}"


def slow_down(engine: Any, number: float) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.05 / (1 + number % 5)


class Counting:
    """Counts what it hears, and lowers the rate of another engine."""

    def __init__(self, run: Any) -> None:
        self.run, self.count = run, 0

    def advance(self) -> None:
        self.count += 1
        slow_down(self.run, self.count)


class Saving(Counting):
    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def on_evaluator(run: Any, handler: Callable[..., object]) -> None:
    run.evaluator.add_event_handler(Events.COMPLETED, handler)


def on_bus(run: Any, handler: Callable[..., object]) -> None:
    run.bus.subscribe(Events.EPOCH_COMPLETED, handler)


def by_blinker(run: Any, handler: Callable[..., object]) -> None:
    def receive(sender: Any, event: Any) -> None:
        handler()

    run.bus.signal(Events.EPOCH_COMPLETED).connect(receive, weak=False)


def with_validation(attach: Callable[[Any], object]) -> dict[str, Any]:
    return {"attached": attach, "val_loader": loader(8, shuffle=False)}


@case("handler Counting.count")
def a_method_hears_the_evaluator() -> dict[str, Any]:
    return with_validation(lambda run: on_evaluator(run, Counting(run).advance))


@case()
def an_object_with_a_state_hears_the_evaluator() -> dict[str, Any]:
    return with_validation(lambda run: on_evaluator(run, Saving(run).advance))


@case(slow=True)
def ignites_early_stopping_hears_the_evaluator() -> dict[str, Any]:
    return with_validation(lambda run: on_evaluator(run, EarlyStopping(2, lambda engine: 0.0, run)))


@case("handler Counting.count")
def a_method_hears_every_engine() -> dict[str, Any]:
    return {"attached": lambda run: on_bus(run, Counting(run).advance)}


@case(slow=True)
def an_object_with_a_state_hears_every_engine() -> dict[str, Any]:
    return {"attached": lambda run: on_bus(run, Saving(run).advance)}


@case(f"{HERE}.by_blinker.<locals>.receive.handler")
def a_plain_receiver_counts() -> dict[str, Any]:
    return {"attached": lambda run: by_blinker(run, Counting(run).advance)}


class Curriculum:
    level = 0

    @classmethod
    def step(cls) -> None:
        cls.level += 1


@case(f"{HERE}.Curriculum.step: level")
def a_class_method_counts() -> dict[str, Any]:
    Curriculum.level = 0

    def attach(run: Any) -> None:
        run.add_event_handler(Events.ITERATION_COMPLETED, Curriculum.step)
        run.add_event_handler(Events.ITERATION_STARTED, use, Curriculum.__dict__)

    return {"attached": attach}


def use(engine: Any, held: Any) -> None:
    slow_down(engine, held["level"])


@case("handler list.append: object")
def a_lists_append_hears_the_run() -> dict[str, Any]:
    def attach(run: Any) -> None:
        seen: list[int] = []
        run.add_event_handler(Events.EPOCH_COMPLETED, seen.append, 1)
        run.add_event_handler(Events.ITERATION_STARTED, lambda engine: slow_down(engine, len(seen)))

    return {"attached": attach}


@pytest.mark.parametrize(("make", "lacks"), CASES)
def test_what_has_changed_is_resumed_or_named(make: Make, lacks: tuple[str, ...], tmp_path: Path):
    check_that_what_has_changed_is_resumed_or_named(make, lacks, tmp_path)
