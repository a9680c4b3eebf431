"""State that was added to a run after some of its checkpoints were made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from pulsetrain import Checkpointer, Every, SupervisedStrategy, Trainer, TrainingConfig
from pulsetrain.engine import CheckpointError, Engine, Events
from pulsetrain.state.part import Part
from pulsetrain.state.resume import Resumer
from pulsetrain.state.run_state import Counters


class Slow:
    """A part of a run's state that subscribes, too."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.batches = state["batches"]

    def attach(self, engine: Engine) -> None:
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.count)

    def count(self) -> None:
        self.batches += 1


def trainer(folder: Path, *, slow: Slow | None = None) -> Trainer:
    """With another part: one entry more in the mapping that `Trainer.__init__` passes to the Resumer."""
    torch.manual_seed(0)

    def resumer(parts: Mapping[str, Part], *rest: Any) -> Resumer:
        return Resumer(parts if slow is None else {**parts, "slow": slow}, *rest)

    with patch("pulsetrain.trainer.Resumer", resumer):
        return Trainer(
            nn.Linear(2, 1),
            [(torch.ones(4, 2), torch.ones(4, 1))] * 5,
            strategy=SupervisedStrategy("mse"),
            config=TrainingConfig(max_epochs=2, seed=0),
            handlers=[Checkpointer(folder, Every(epochs=1), keep_last=9)],
        )


def test_a_part_is_saved_once_and_restored(tmp_path: Path) -> None:
    first = trainer(tmp_path, slow=Slow())
    first.train()
    state = first.checkpoint_state()
    assert (state["slow"], list(state["handlers"])) == ({"batches": 10}, ["Checkpointer"])
    again = Slow()
    trainer(tmp_path, slow=again).train(resume="latest")
    assert again.batches == 10


def test_a_checkpoint_without_the_part_is_loaded_and_the_part_starts_from_its_beginning(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    slow = Slow()
    slow.batches = 7
    with capture_logs() as logs:
        trainer(tmp_path, slow=slow).load_checkpoint(tmp_path / "checkpoints" / "000000005-checkpoint")
    assert slow.batches == 0
    (warning,) = [each for each in logs if each.get("part") == "slow"]
    assert "no state for a part" in warning["event"]


def test_a_field_that_an_older_checkpoint_lacks_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    trainer(tmp_path, slow=Slow()).train()
    resumed = trainer(tmp_path, slow=Slow())
    before: dict[str, Any] = {name: value.clone() for name, value in resumed.model.state_dict().items()}
    state = {**resumed.checkpoint_state(), "slow": {}}
    state["counters"] = {**state["counters"], "iteration": 9}
    with pytest.raises(CheckpointError, match="the checkpoint's state of 'slow' lacks 'batches'"):
        resumed.load_checkpoint_state(state)
    assert resumed.state.iteration == 0
    assert all(torch.equal(value, before[name]) for name, value in resumed.model.state_dict().items())


def test_a_part_that_every_checkpoint_has_is_required(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    state = {name: part for name, part in made.checkpoint_state().items() if name != "reporter"}
    with pytest.raises(CheckpointError, match="lacks reporter"):
        made.load_checkpoint_state(state)


class Forgetful(Slow):
    """A handler whose state lacks what it reads."""

    def attach(self, engine: Trainer) -> None:
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.count)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.batches = state["batches"] + state["more"]


def test_a_handler_that_cannot_load_its_state_is_named(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    handler = Forgetful()
    made.handlers.append(handler)
    handler.attach(made)
    state = made.checkpoint_state()
    with pytest.raises(CheckpointError, match="state of the handler Forgetful lacks 'more'; load another") as refused:
        made.load_checkpoint_state(state)
    assert any("'handlers' could not be put back either: CheckpointError" in note for note in refused.value.__notes__)
    made.registry.remember()
    with pytest.raises(KeyError) as failed:
        made.registry.reset()
    assert failed.value.__notes__ == ["in Forgetful.load_state_dict()"]


def test_a_checkpoint_that_a_handler_refuses_leaves_the_runs_metrics_as_they_are(tmp_path: Path) -> None:
    made = trainer(tmp_path, slow=Slow())
    made.train()
    metrics = {"text": "a", "several": torch.ones(3), "one": 1.0}
    made.state.metrics = metrics
    with pytest.raises(CheckpointError, match="lacks 'batches'"):
        made.load_checkpoint_state({**made.checkpoint_state(), "slow": {}})
    assert made.state.metrics is metrics
    assert list(metrics) == ["text", "several", "one"]


@dataclass(frozen=True, kw_only=True)
class Widths(TrainingConfig):
    """A user's configuration with a setting that has no default."""

    hidden: int


def test_the_settings_of_a_users_configuration_are_saved_without_making_another_one(tmp_path: Path) -> None:
    config = Widths(hidden=4, max_epochs=1)
    made = Trainer(
        nn.Linear(2, 1), [(torch.ones(4, 2), torch.ones(4, 1))], strategy=SupervisedStrategy("mse"), config=config
    )
    assert made.checkpoint_state()["made_with"]["settings"] == {"max_epochs": "1", "hidden": "4"}


def test_a_counter_is_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trainer(tmp_path / "first")
    first.train()
    older = first.checkpoint_state()
    monkeypatch.setattr(Counters, "NAMES", (*Counters.NAMES, "restarts"))
    counting = trainer(tmp_path / "second")
    assert counting.checkpoint_state()["counters"]["restarts"] == 0
    counting.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda engine: setattr(engine.state, "restarts", 3))
    with capture_logs() as logs:
        counting.train()
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == []
    again = trainer(tmp_path / "third")
    again.load_checkpoint_state(counting.checkpoint_state())
    assert again.state.restarts == 3
    again.load_checkpoint_state(older)
    assert again.state.restarts == 0


@pytest.mark.parametrize("part", ["modules", "unsaved"])
def test_a_checkpoint_of_before_a_part_was_added_loads_with_a_warning(part: str, tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train()
    state = {name: entry for name, entry in made.checkpoint_state().items() if name != part}
    with capture_logs() as logs:
        trainer(tmp_path / "again").load_checkpoint_state(state)
    assert [each["part"] for each in logs if "no state for a part" in each["event"]] == [part]


@pytest.mark.parametrize("field", ["frozen", "eval", "dropout", "buffers"])
def test_a_field_that_is_lost_of_a_modules_state_is_named(field: str, tmp_path: Path) -> None:
    made = trainer(tmp_path)
    state = made.checkpoint_state()
    del state["modules"]["model"][field]
    with pytest.raises(CheckpointError, match=f"lacks modules.model.{field}"):
        made.load_checkpoint_state(state)
