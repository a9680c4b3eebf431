"""The model, strategy, data and optimizer: numbers that change without being saved are reported at the first save,
states that no checkpoint can hold end the run before its first batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pulsetrain import Trainer
from pulsetrain.engine import CheckpointError, Events, Every, SupervisedStrategy
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.handlers import Checkpointer
from tests.support.models import loader, regression_model, trainer
from tests.support.runs import saving_run, warnings_of


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = regression_model()
        self.steps, self.rate, self.started, self.width = 0, 1.0, False, 4

    def forward(self, inputs: Any) -> Any:
        self.steps, self.rate, self.started = self.steps + 1, self.rate * 0.9, True
        return self.inner(inputs)


class CountsInItsState(Counts):
    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


class CountingStrategy(SupervisedStrategy):
    def __init__(self) -> None:
        super().__init__("mse")
        self.batches = 0

    def prepare_batch(self, batch: Any) -> Any:
        self.batches += 1
        return super().prepare_batch(batch)


class SavedStrategy(CountingStrategy):
    def state_dict(self) -> Any:
        return {"batches": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["batches"]


def changed(run: Trainer) -> list[list[str]]:
    return [each["attributes"] for each in warnings_of(run) if "attributes change during the run" in each["event"]]


def test_numbers_that_change_and_are_in_no_checkpoint_are_named_once_at_the_first_save(tmp_path: Path):
    model = nn.Sequential(Counts())
    run = saving_run(tmp_path, epochs=3, every=Every(iterations=1), model=model, strategy=CountingStrategy())
    assert changed(run) == [["model.0.rate", "model.0.started", "model.0.steps", "strategy.batches"]]
    assert changed(saving_run(None, model=Counts())) == []


def test_numbers_that_a_state_holds_are_not_named(tmp_path: Path):
    assert changed(saving_run(tmp_path, epochs=2, model=CountsInItsState(), strategy=SavedStrategy())) == []


def test_a_strategy_with_half_a_state_is_reported(tmp_path: Path):
    class Half(CountingStrategy):
        def state_dict(self) -> Any:
            return {}

    warnings = [each["event"] for each in warnings_of(saving_run(tmp_path, strategy=Half()))]
    assert "the strategy has state_dict() and no load_state_dict(): its state is not saved; give it both" in warnings


# ------------------------------------------------------------- what cannot be saved, of the trainer's own parts


class OddState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = regression_model()

    def forward(self, inputs: Any) -> Any:
        return self.inner(inputs)

    def get_extra_state(self) -> Any:
        return {1, 2}

    def set_extra_state(self, state: Any) -> None:
        """Nothing to do."""


class OddLoader:
    def __iter__(self) -> Iterator[Any]:
        return iter(loader())

    def state_dict(self) -> Any:
        return {"seen": {1, 2}}

    def load_state_dict(self, state: Any) -> None:
        """Nothing to do."""


class OddStrategy(SavedStrategy):
    def state_dict(self) -> Any:
        return {"seen": {1}}


class OddOptimizer(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "seen": {1}}


@pytest.mark.parametrize(
    ("part", "arguments"),
    [
        ("['model']['_extra_state']", {"model": OddState}),
        ("['data']['loader']['seen']", {"train_loader": OddLoader}),
        ("['strategy']['seen']", {"strategy": OddStrategy}),
        ("['optimizer']['seen']", {"optimizer": lambda: lambda parameters: OddOptimizer(parameters, lr=0.1)}),
    ],
)
def test_what_no_checkpoint_can_hold_ends_the_run_before_its_first_batch(part: str, arguments: Any, tmp_path: Path):
    def made() -> dict[str, Any]:
        return {name: make_it() for name, make_it in arguments.items()}

    run = saving_run(tmp_path, **made())
    with pytest.raises(CheckpointError) as caught:
        run.train()
    assert str(caught.value).startswith(f"checkpoint{part}: set: could not be loaded again")
    assert run.state.iteration == 0
    saving_run(None, **made()).train()  # no warning without a checkpointer


def test_a_generator_without_a_state_is_listed_as_not_seen(tmp_path: Path):
    run = trainer({"max_epochs": 1}, handlers=[Checkpointer(tmp_path)])
    source = random.SystemRandom()
    run.add_event_handler(Events.ITERATION_STARTED, lambda: source.random())
    run.train()
    (saved,) = CheckpointManager(tmp_path / "checkpoints").valid()
    unsaved = load_checkpoint(saved)["unsaved"]
    assert [name.rpartition(".")[2] for name in unsaved["not_seen"]] == ["source"]
    assert unsaved["changed"] == []
