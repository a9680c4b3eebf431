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
from pulsetrain.engine import Events, Every, SupervisedStrategy
from pulsetrain.engine.checkpoint import find_checkpoints
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.handlers import EMA, Checkpointer, EventRecorder
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


@pytest.mark.parametrize("what", CHANGES)
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
