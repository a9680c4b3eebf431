"""A resumed run's optimizer: groups that were added during the run, and learning rates that were changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from pulsetrain import Checkpointer, Trainer
from pulsetrain.engine import CheckpointError, Events, Every
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.schedules import update_optimizer
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


def decay(run: Trainer) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=2, gamma=0.5)
    run.add_event_handler(Events.OPTIMIZER_STEP_COMPLETED, scheduler.step)


def warm_up(run: Trainer) -> None:
    scheduler = torch.optim.lr_scheduler.LinearLR(run.optimizer, 0.1, total_iters=6)  # it sets the first rate at once
    run.add_event_handler(Events.OPTIMIZER_STEP_COMPLETED, scheduler.step)


def by_hand(run: Trainer) -> None:
    @run.on(Events.ITERATION_STARTED)
    def set_rates() -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = 0.05 / run.state.iteration


SCHEDULES = [decay, warm_up, by_hand]
Schedule = Callable[[Trainer], None]


def scheduled(folder: Path, schedule: Schedule | None, rate: float = 0.05, epochs: int = 2) -> Trainer:
    saver = Checkpointer(folder, Every(iterations=4), at_end=False, keep_last=9)
    made = trainer({"max_epochs": epochs, "learning_rate": rate}, handlers=[saver])
    if schedule is not None:
        schedule(made)
    return made


def warned_of_rates(act: Callable[[], object]) -> list[tuple[list[float], list[float]]]:
    """The rates of the checkpoint and the configured ones, as warnings name them."""
    with capture_logs() as logs:
        act()
    return [(each["checkpoint"], each["configured"]) for each in logs if "learning rates" in each["event"]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_that_the_users_schedule_has_set_are_resumed_without_a_warning(schedule: Schedule, tmp_path: Path):
    cut_after(scheduled(tmp_path, schedule), 6)
    assert warned_of_rates(lambda: cut_after(scheduled(tmp_path, schedule), 14, resume="latest")) == []
    assert warned_of_rates(lambda: scheduled(tmp_path, schedule).train(resume="latest")) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_returns_to_its_checkpoint_is_not_warned_of_its_own_rates(schedule: Schedule, tmp_path: Path):
    run = scheduled(tmp_path, schedule)
    run.add_event_handler(Events.ITERATION_COMPLETED(once=7), lambda: run.rewind(7, 7, "a test"))
    assert warned_of_rates(run.train) == []


@pytest.mark.parametrize("schedule", [None, decay, by_hand])
def test_another_configured_rate_is_warned_of_at_each_resume(schedule: Schedule | None, tmp_path: Path):
    cut_after(scheduled(tmp_path, schedule), 6)
    first = warned_of_rates(lambda: cut_after(scheduled(tmp_path, schedule, rate=0.2), 14, resume="latest"))
    second = warned_of_rates(lambda: scheduled(tmp_path, schedule, rate=0.2).train(resume="latest"))
    assert [configured for _, configured in first] == [[0.2]]
    assert [configured for _, configured in second] == [[0.2]]


def test_a_checkpoint_that_does_not_know_the_first_rates_is_compared_by_its_last_ones(tmp_path: Path):
    cut_after(scheduled(tmp_path, by_hand), 6)
    saved = CheckpointManager(tmp_path / "checkpoints").get_latest()
    assert saved is not None
    state = load_checkpoint(saved)
    state["optimizer"].pop("initial_rates", None)
    again = scheduled(tmp_path / "again", by_hand)
    assert warned_of_rates(lambda: again.load_checkpoint_state(state)) == [([0.05 / 4], [0.05])]
    assert warned_of_rates(again.train) == []


def test_after_a_resume_with_another_rate_update_optimizer_sets_it(tmp_path: Path):
    def run(rate: float, **bounds: int) -> Trainer:
        torch.manual_seed(0)
        model: Any = regression_model()
        first, *others = model.parameters()
        optimizer = torch.optim.SGD([{"params": others}, {"params": [first], "lr": 2 * rate}], lr=rate)
        return trainer(
            {"seed": 7, **bounds},
            model=model,
            optimizer=optimizer,
            train_loader=loader(),
            handlers=[Checkpointer(tmp_path)],
        )

    run(0.01, max_epochs=1).train()
    again = run(0.05, max_epochs=2)
    again.add_event_handler(Events.EPOCH_STARTED, lambda: update_optimizer(again.optimizer, 0.03))
    with capture_logs() as logs:
        again.train(resume="latest")
    assert any("update_optimizer() sets others" in each["event"] for each in logs)
    assert [group["lr"] for group in again.optimizer.param_groups] == [0.03, 0.06]
