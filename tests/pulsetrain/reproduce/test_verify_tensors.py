"""`verify` compares tensors with those of the run's checkpoints, where no event shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pulsetrain import Trainer, verify
from pulsetrain.engine import Events, Every, Phase, SupervisedStrategy
from pulsetrain.engine.checkpoint import find_checkpoints
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.handlers import EMA, BestModel, Checkpointer, EventRecorder
from tests.support.cases import slow_but
from tests.support.models import loader, regression_model, trainer


class WithBuffer(nn.Module):
    """A model or a loss with a buffer that reaches no output."""

    def __init__(self, inner: nn.Module, persistent: bool) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.ones(3), persistent=persistent)

    def forward(self, *given: Tensor) -> Tensor:
        return self.inner(*given)


def build(folder: Path, change: Callable[[Trainer], object] | None = None) -> Trainer:
    """A trainer of which a handler changes something in the last epoch, after all that is recorded."""
    criterion = WithBuffer(nn.MSELoss(), persistent=True)
    made = trainer(
        {"max_epochs": 2, "optimizer": "adamw", "seed": 3},
        model=WithBuffer(regression_model(), persistent=False),
        strategy=SupervisedStrategy(criterion),
        val_loader=loader(shuffle=False),
        handlers=[EventRecorder(folder), Checkpointer(folder, every=Every(iterations=8), keep_last=20), EMA(0.5)],
    )
    made.criterion = criterion
    if change is not None:
        made.add_event_handler(Events.EPOCH_COMPLETED(once=2), change)
    return made


def scale(tensors: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for each in tensors:
            each.mul_(-100)


def scale_average(engine: Trainer) -> None:
    average = next(each for each in engine.handlers if isinstance(each, EMA))
    state: dict[str, Any] = average.state_dict()
    scale(state["average"]["weights"].values())
    average.load_state_dict(state)


CHANGES: dict[str, tuple[Callable[[Trainer], object], str]] = {
    "weights": (lambda engine: scale(engine.model.parameters()), "model."),
    "the optimizer": (lambda engine: scale(each["exp_avg"] for each in engine.optimizer.state.values()), "optimizer."),
    "a buffer that is not persistent": (lambda engine: scale([engine.model.seen]), "modules.model.buffers.seen"),
    "a buffer of the loss": (lambda engine: scale([engine.criterion.seen]), "weights.seen"),
    "an average": (scale_average, "handlers.EMA"),
}


@pytest.mark.parametrize("what", slow_but(("weights", "an average"), CHANGES))
def test_what_no_event_shows_is_compared_with_the_checkpoints(what: str, tmp_path: Path):
    change, name = CHANGES[what]
    build(tmp_path / "run", change).train()
    assert verify(tmp_path / "run", partial(build, change=change))
    found = verify(tmp_path / "run", build)
    assert not found
    assert (found.divergence, found.missing) == (None, None)
    assert found.tensor is not None
    assert name in found.tensor
    assert "values differ" in found.report()


def test_a_reproduced_run_names_the_checkpoints_whose_tensors_agree(tmp_path: Path):
    build(tmp_path / "run").train()
    found = verify(tmp_path / "run", build)
    assert found
    steps = [step_of(path) for path in find_checkpoints(tmp_path / "run" / "checkpoints")]
    assert found.checkpoints == tuple(sorted(set(steps)))
    assert f"those of iteration {steps[0]}" in found.report()


@pytest.mark.parametrize("writes", [False, True])
def test_a_run_that_keeps_its_best_weights_is_reproduced(writes: bool, tmp_path: Path):
    def with_best(folder: Path) -> Trainer:
        made = build(folder)
        best = BestModel(folder=folder if writes else None)
        made.handlers.append(best)
        best.attach(made)
        return made

    with_best(tmp_path / "run").train()
    found = verify(tmp_path / "run", with_best)
    assert found, found.report()
    assert found.checkpoints


def build_saving(folder: Path, every: Every, end: Events, phase: Phase | None = None, epochs: int = 2) -> Trainer:
    """A trainer whose Checkpointer saves at this cadence, and whose weights a handler changes at this last event."""
    made = trainer(
        {"max_epochs": epochs, "optimizer": "adamw", "seed": 3},
        strategy=SupervisedStrategy("mse"),
        handlers=[EventRecorder(folder), Checkpointer(folder, every=every, keep_last=20)],
    )

    def change(engine: Trainer) -> None:
        if engine.state.iteration == 2 * engine.state.epoch_length:
            scale(engine.model.parameters())

    if phase is not None:
        made.add_event_handler(end, change, phase=phase)
    return made


ENDS = [Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED]


@pytest.mark.parametrize("saved", slow_but((Events.COMPLETED,), ENDS), ids=str)
@pytest.mark.parametrize("changed", slow_but((Events.EPOCH_COMPLETED,), ENDS), ids=str)
def test_the_last_checkpoint_is_compared_at_the_event_at_which_it_was_saved(
    saved: Events, changed: Events, tmp_path: Path
):
    every = {ENDS[0]: Every(iterations=1), ENDS[1]: Every(epochs=1), ENDS[2]: Every(iterations=100)}[saved]
    plain = partial(build_saving, every=every, end=changed)
    changing = partial(plain, phase=Phase.ACT)
    plain(tmp_path / "plain").train()
    changing(tmp_path / "changing").train()
    # reproduced, also where the weights are changed after the save
    assert verify(tmp_path / "plain", plain)
    assert verify(tmp_path / "changing", changing)
    covered = ENDS.index(changed) <= ENDS.index(saved)
    for run, rerun in (("plain", changing), ("changing", plain)):
        found = verify(tmp_path / run, rerun)
        assert (bool(found), found.tensor is None) == (not covered, not covered)


def test_a_run_that_was_extended_is_compared_where_its_first_part_ended(tmp_path: Path):
    build = partial(build_saving, every=Every(iterations=100), end=Events.COMPLETED)
    build(tmp_path / "run").train()
    (first,) = find_checkpoints(tmp_path / "run" / "checkpoints")
    build(tmp_path / "run", epochs=3).train(resume="latest")
    found = verify(tmp_path / "run", partial(build, epochs=3))
    assert found
    assert found.checkpoints[0] == step_of(first) < found.checkpoints[1]


class KeepsTensors:
    """A handler whose state has this many tensors in a list, and these of a name."""

    def __init__(self, listed: int, named: list[str]) -> None:
        self.listed, self.named = listed, named

    def attach(self, engine: Trainer) -> None: ...

    def detach(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"list": [torch.ones(1)] * self.listed, "named": {name: torch.ones(1) for name in self.named}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("recorded", "rerun"),
    [
        pytest.param((1, ["a"]), (2, ["a"]), id="a longer list"),
        pytest.param((2, ["a"]), (1, ["a"]), id="a shorter list", marks=pytest.mark.slow),
        pytest.param((1, ["a"]), (1, ["a", "b"]), id="one more tensor", marks=pytest.mark.slow),
        pytest.param((1, ["a", "b"]), (1, ["a"]), id="one tensor fewer", marks=pytest.mark.slow),
    ],
)
def test_tensors_that_only_one_of_the_runs_has_are_a_difference(
    recorded: tuple[int, list[str]], rerun: tuple[int, list[str]], tmp_path: Path
):
    def made(folder: Path, keeps: tuple[int, list[str]]) -> Trainer:
        handlers = [EventRecorder(folder), Checkpointer(folder), KeepsTensors(*keeps)]
        return trainer({"max_epochs": 1, "optimizer": "sgd", "seed": 3}, handlers=handlers)

    made(tmp_path / "run", recorded).train()
    assert verify(tmp_path / "run", partial(made, keeps=recorded))
    found = verify(tmp_path / "run", partial(made, keeps=rerun))
    assert not found
    assert found.tensor is not None
    assert "handlers.KeepsTensors" in found.tensor
