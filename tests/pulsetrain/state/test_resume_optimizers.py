"""A resumed run's optimizer: groups that were added during the run, and learning rates that were changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pulsetrain import Checkpointer, Trainer
from pulsetrain.engine import CheckpointError, Events, Every
from tests.support.models import loader, regression_model, trainer
from tests.support.runs import cut_after, weights

Act = Callable[[nn.Sequential, torch.optim.Optimizer], None]


def replace_head(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(7)
    model[-1] = nn.Linear(8, 1)
    optimizer.add_param_group({"params": list(model[-1].parameters())})


def replace_two_modules(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    replace_head(model, optimizer)
    model[0] = nn.Linear(4, 8)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})


def run_that(act: Act, folder: Path, *, already: bool = False) -> Trainer:
    """Acts after the third iteration, or before the run begins."""
    torch.manual_seed(0)
    model: Any = regression_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if already:
        act(model, optimizer)
    made = trainer(
        {"max_epochs": 2, "seed": 7},
        model=model,
        optimizer=optimizer,
        train_loader=loader(),
        handlers=[Checkpointer(folder, Every(iterations=4), at_end=False)],
    )
    if not already:
        made.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: act(model, optimizer))
    return made


@pytest.mark.parametrize(
    ("act", "names"),
    [(replace_head, "4.weight, 4.bias"), (replace_two_modules, "4.weight, 4.bias, 0.weight, 0.bias")],
)
def test_groups_that_cannot_be_added_again_are_refused_before_anything_is_loaded(act: Act, names: str, tmp_path: Path):
    cut_after(run_that(act, tmp_path), 6)
    again = run_that(act, tmp_path)
    before = weights(again)
    with pytest.raises(Exception) as refused:  # noqa: PT011  # its type is compared below
        again.train(resume="latest")
    assert refused.type is CheckpointError, refused.value
    assert f"the parameters {names}" in str(refused.value)
    assert "replace the modules and add the groups before train(resume=...)" in str(refused.value)
    assert all(torch.equal(before[name], value) for name, value in weights(again).items())
    assert not again.optimizer.state


@pytest.mark.parametrize("act", [replace_head, replace_two_modules])
def test_a_run_whose_modules_were_replaced_resumes_if_they_are_replaced_beforehand(act: Act, tmp_path: Path):
    whole = run_that(act, tmp_path / "whole")
    whole.train()
    cut_after(run_that(act, tmp_path / "cut"), 6)
    again = run_that(act, tmp_path / "cut", already=True)
    again.train(resume="latest")
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(again).items())
