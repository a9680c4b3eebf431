"""Several handlers of one class: on resume, each gets its own state or is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog
import torch

from pulsetrain import Trainer
from pulsetrain.engine import Events, Every
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.handlers import Checkpointer
from tests.support.models import trainer


class Adding:
    """Adds its step up; two of them differ by their settings."""

    def __init__(self, step: Any, name: str | None = None) -> None:
        self.step, self.total = step, 0
        if name is not None:
            self.name = name

    def attach(self, engine: Any) -> None:
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.add)

    def add(self, engine: Any) -> None:
        self.total += int(self.step)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def reported_on_resume(folder: Path, *handlers: Any, epochs: int) -> list[tuple[str, Any]]:
    run = trainer({"max_epochs": epochs, "seed": 7}, handlers=[Checkpointer(folder), *handlers])
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    found = [
        (line["event"], line.get("handler", line.get("handlers"))) for line in logs if line["log_level"] == "warning"
    ]
    return [("by order", names) if "only their order says" in event else (event, names) for event, names in found]


GONE = "the checkpoint has the state of a handler that the run does not have"
NEW = "the checkpoint has no state for a handler, which starts from its beginning"


def test_two_of_a_class_in_another_order_get_their_own_states(tmp_path: Path):
    reported_on_resume(tmp_path, Adding(1), Adding(100), epochs=1)
    one, hundred = Adding(1), Adding(100)
    assert reported_on_resume(tmp_path, hundred, one, epochs=2) == []
    assert (one.total, hundred.total) == (20, 2000)


def test_if_the_first_of_two_is_removed_the_other_keeps_its_state(tmp_path: Path):
    reported_on_resume(tmp_path, Adding(1), Adding(100), epochs=1)
    hundred = Adding(100)
    assert reported_on_resume(tmp_path, hundred, epochs=2) == [(GONE, "Adding")]
    assert hundred.total == 2000


def test_if_one_is_added_before_it_the_other_keeps_its_state(tmp_path: Path):
    reported_on_resume(tmp_path, Adding(100), epochs=1)
    one, hundred = Adding(1), Adding(100)
    assert reported_on_resume(tmp_path, one, hundred, epochs=2) == [(NEW, "Adding")]
    assert (one.total, hundred.total) == (10, 2000)


def test_one_of_a_class_keeps_its_state_under_other_settings(tmp_path: Path):
    reported_on_resume(tmp_path, Adding(1), epochs=1)
    other = Adding(100)
    assert reported_on_resume(tmp_path, other, epochs=2) == []
    assert other.total == 1010


def test_handlers_that_differ_only_in_order_are_reported(tmp_path: Path):
    class Number:  # no plain setting
        def __init__(self, value: int) -> None:
            self.value = value

        def __int__(self) -> int:
            return self.value

    reported_on_resume(tmp_path / "alike", Adding(Number(1)), Adding(Number(100)), epochs=1)
    reported = reported_on_resume(tmp_path / "alike", Adding(Number(1)), Adding(Number(100)), epochs=2)
    assert reported == [("by order", ["Adding", "Adding_2"])]

    reported_on_resume(tmp_path / "changed", Adding(1), Adding(100), epochs=1)
    assert reported_on_resume(tmp_path / "changed", Adding(1), Adding(50), epochs=2) == [("by order", ["Adding_2"])]

    reported_on_resume(tmp_path / "named", Adding(Number(1), "a"), Adding(Number(100), "b"), epochs=1)
    a, b = Adding(Number(1), "a"), Adding(Number(100), "b")
    assert reported_on_resume(tmp_path / "named", b, a, epochs=2) == []
    assert (a.total, b.total) == (20, 2000)


def test_settings_that_change_during_the_run_distinguish_by_their_first_values(tmp_path: Path):
    """A torch scheduler's last_epoch is an argument of its constructor."""

    def scheduled(folder: Path, *sizes: int) -> tuple[Trainer, dict[int, Any]]:
        checkpointer = Checkpointer(folder, every=Every(iterations=1), at_end=False)
        run = trainer({"max_epochs": 2, "seed": 7}, handlers=[checkpointer])
        made = {size: torch.optim.lr_scheduler.StepLR(run.optimizer, size, gamma=0.9) for size in sizes}
        for scheduler in made.values():
            run.add_event_handler(Events.ITERATION_COMPLETED, scheduler.step)
        return run, made

    first, _ = scheduled(tmp_path, 3, 4)
    first.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda engine: engine.terminate())
    first.train()
    run, made = scheduled(tmp_path, 4, 3)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    assert not [line for line in logs if "only their order says" in line["event"]]
    assert {size: (each.step_size, each.last_epoch) for size, each in made.items()} == {4: (4, 20), 3: (3, 20)}


def test_the_run_folder_may_have_changed(tmp_path: Path):
    def run(folder: Path) -> Trainer:
        in_two_places = [Adding(folder), Adding(folder / "inside")]
        for each in in_two_places:
            each.add = lambda engine: None  # type: ignore[method-assign]
        return trainer({"max_epochs": 1, "seed": 7}, handlers=[Checkpointer(folder), *in_two_places])

    run(tmp_path / "a").train()
    other = run(tmp_path / "b")
    with structlog.testing.capture_logs() as logs:
        other.load_checkpoint(CheckpointManager(tmp_path / "a" / "checkpoints").get_latest())
    assert not [line for line in logs if line["log_level"] == "warning"]
