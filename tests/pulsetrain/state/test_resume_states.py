"""The states of strategies, handlers and generators are resumed, or rejected before anything is loaded."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn

from pulsetrain import Trainer
from pulsetrain.engine import CheckpointError, Events, Every, SupervisedStrategy
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.handlers import EMA, Checkpointer
from tests.support.models import Keeping, trainer
from tests.support.runs import cut_after, resumable_run, weights


class Warming(SupervisedStrategy):
    """Its loss depends on how many batches it has seen."""

    def __init__(self) -> None:
        super().__init__("mse")
        self.seen = 0

    def compute_loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        self.seen += 1
        return super().compute_loss(outputs, batch) * (1 + 0.1 * self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seen"] < 0:
            raise ValueError(f"Warming: seen={state['seen']}")
        self.seen = state["seen"]


class WarmingModule(nn.Module):
    """The same count, in a buffer that is loaded in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SupervisedStrategy("mse")
        self.register_buffer("seen", torch.zeros(()))
        self.prepare_batch, self.compute_metrics = self.inner.prepare_batch, self.inner.compute_metrics

    def compute_loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        self.seen += 1
        return self.inner.compute_loss(outputs, batch) * (1 + 0.1 * self.seen)


def with_strategy(folder: Path, strategy: Any, *handlers: Any) -> Trainer:
    checkpointer = Checkpointer(folder, every=Every(iterations=1), keep_last=100, at_end=False)
    return trainer({"max_epochs": 2, "seed": 7}, strategy=strategy, handlers=[checkpointer, *handlers])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Warming, WarmingModule])
def test_a_strategys_state_is_resumed(kind: Any, tmp_path: Path):
    whole = with_strategy(tmp_path / "whole", kind())
    whole.train()
    cut_after(with_strategy(tmp_path / "cut", kind()), 13)
    again = with_strategy(tmp_path / "cut", kind())
    again.train(resume="latest")
    assert again.strategy.seen == whole.strategy.seen == 20
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(again).items())


def test_a_strategy_that_cannot_load_the_saved_state_is_rejected_before_anything_is_loaded(tmp_path: Path):
    with_strategy(tmp_path, Warming()).train()
    other = with_strategy(tmp_path, SupervisedStrategy("mse"))
    before = weights(other)
    with pytest.raises(
        CheckpointError, match=r"SupervisedStrategy has no state_dict\(\) and load_state_dict\(\); resume"
    ):
        other.train(resume="latest")
    assert all(torch.equal(before[name], value) for name, value in weights(other).items())
    assert other.state.iteration == 0


def test_a_strategy_without_a_saved_state_starts_over_and_says_so(tmp_path: Path):
    with_strategy(tmp_path, SupervisedStrategy("mse")).train()
    with structlog.testing.capture_logs() as logs:
        with_strategy(tmp_path, Warming()).train(resume="latest")
    assert [
        line["strategy"]
        for line in logs
        if line["event"] == "the checkpoint has no state for the strategy, which starts from its beginning"
    ] == ["Warming"]


def altered(folder: Path, **parts: Any) -> Path:
    """A checkpoint in which parts are others."""
    manager = CheckpointManager(folder / "checkpoints")
    state = load_checkpoint(manager.get_latest())
    return manager.save({**state, **parts}, "altered", step=99)


class Averaging:
    """Loads its state in place."""

    def __init__(self) -> None:
        self.values = torch.zeros(2)

    def attach(self, engine: Any) -> None:
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.add)

    def add(self, engine: Any) -> None:
        self.values += 1

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])


class Refusing(Averaging):
    """Rejects a negative sum."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["values"][0] < 0:
            raise CheckpointError("does not fit")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Warming, WarmingModule])
def test_if_a_handler_rejects_its_state_all_others_stay_unchanged(strategy: Any, tmp_path: Path):
    run = with_strategy(tmp_path, strategy(), Averaging(), EMA(decay=0.9), Refusing())
    run.train()
    saved = load_checkpoint(CheckpointManager(tmp_path / "checkpoints").get_latest())
    refused = {**saved["handlers"]["Refusing"], "state": {"values": torch.full((2,), -1.0)}}
    path = altered(tmp_path, handlers={**saved["handlers"], "Refusing": refused})
    other = with_strategy(tmp_path / "other", strategy(), Averaging(), EMA(decay=0.9), Refusing())
    before = weights(other)
    ema = {name: value.clone() for name, value in other.handlers[2].state_dict()["average"]["weights"].items()}
    with pytest.raises(CheckpointError, match="does not fit"):
        other.load_checkpoint(path)
    assert other.strategy.seen == 0
    assert [each.values.tolist() for each in other.handlers if isinstance(each, Averaging)] == [[0, 0], [0, 0]]
    assert other.handlers[2].number_averaged == 0
    after = other.handlers[2].state_dict()["average"]["weights"]
    assert all(torch.equal(ema[name], value) for name, value in after.items())
    assert all(torch.equal(before[name], value) for name, value in weights(other).items())
    other.load_checkpoint(altered(tmp_path, handlers=saved["handlers"]))
    assert (other.strategy.seen, other.handlers[1].values.tolist()) == (20, [20, 20])
    assert other.handlers[2].number_averaged == 20


@pytest.mark.slow
@pytest.mark.parametrize("part", ["counters", "data"])
def test_a_state_with_a_piece_missing_inside_is_refused_before_anything_is_loaded(part: str, tmp_path: Path):
    resumable_run(tmp_path).train()
    run = resumable_run(tmp_path)
    before = weights(run)
    with pytest.raises(CheckpointError, match=f"the checkpoint's state lacks .*{part}.epoch"):
        run.load_checkpoint(altered(tmp_path, **{part: {}}))
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())


# ------------------------------------------------------------------------------------ generators of devices


@pytest.mark.slow
def test_generators_of_missing_devices_are_reported_and_the_run_continues(tmp_path: Path):
    cut_after(resumable_run(tmp_path), 12)
    state = load_checkpoint(CheckpointManager(tmp_path / "checkpoints").get_latest())
    count = torch.cuda.device_count() + 2
    states = [torch.get_rng_state() if count == 2 else torch.cuda.get_rng_state()] * count
    run = resumable_run(tmp_path)
    with structlog.testing.capture_logs() as logs:
        run.train(resume=altered(tmp_path, rng={**state["rng"], "cuda": states}))
    assert [line["devices"] for line in logs if "fewer devices than the checkpoint" in line["event"]] == [
        [f"cuda: {count} -> {count - 2}"]
    ]
    assert run.state.epoch == 4


@pytest.mark.slow
def test_a_state_without_a_generator_is_refused_before_anything_is_loaded(tmp_path: Path):
    resumable_run(tmp_path).train()
    run = resumable_run(tmp_path)
    before = weights(run)
    with pytest.raises(CheckpointError, match="lacks python, numpy, torch, cuda"):
        run.load_checkpoint(altered(tmp_path, rng={}))
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())


def test_a_module_of_the_strategy_that_loads_by_itself_gets_the_state_that_it_gave(tmp_path: Path):
    strategies = [SupervisedStrategy("mse") for _ in range(2)]
    for resume, strategy in zip((None, "latest"), strategies, strict=True):
        strategy.head = Keeping()  # type: ignore[attr-defined]
        with_strategy(tmp_path, strategy).train(resume=resume)
    assert [each.head.given for each in strategies] == [[], [(OrderedDict, ["_metadata", "note"])]]  # type: ignore[attr-defined]
