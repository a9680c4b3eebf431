"""Torch schedulers over our schedules, and writing rates into an optimizer."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from ignite.handlers import create_lr_scheduler_with_warmup
from torch.optim import lr_scheduler

from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.schedules import (
    Cosine,
    Exponential,
    Warmup,
    build_schedule,
    create_scheduler,
    group_ratios,
    update_optimizer,
)
from pulsetrain.engine.schedules.groups import GroupRates
from pulsetrain.engine.schedules.named import NAMES
from tests.support.schedulers import NEEDED, first_group, optimizer_at, rates_of, through_a_checkpoint, used_rates

# --------------------------------------------------------------------------------- the first update's rate


def test_the_first_update_runs_at_the_rate_of_the_warm_up():
    schedule = Cosine(0.1, 8).after(Warmup(0.1, 4))
    optimizer = optimizer_at(0.1)
    rates = []
    for updates_made in range(6):
        update_optimizer(optimizer, schedule.get_lr(updates_made))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    assert rates[:5] == pytest.approx([0.0, 0.025, 0.05, 0.075, 0.1])


def test_with_ignite_the_first_update_runs_at_the_optimizers_own_rate_before_its_warm_up():
    def with_warmup(optimizer):
        scheduler = create_lr_scheduler_with_warmup(
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=8), warmup_start_value=0.0, warmup_duration=4
        )
        scheduler.step = lambda: scheduler(None)
        scheduler.optimizer = optimizer
        return scheduler

    rates = rates_of(with_warmup, initial_lr=0.1, steps=5)
    assert rates[0] == 0.1, "ignite sets the rate of the first update now: say so where its fault is described"
    assert rates[1:] == pytest.approx([0.0, 0.1 / 3, 0.2 / 3, 0.1])  # the warm-up, one update late


# -------------------------------------------------------------------------------------------- create_scheduler


@pytest.mark.parametrize(
    ("name", "warmup_steps"),
    [(name, steps) for name in NAMES for steps in (0, 4) if (name, steps) != ("one_cycle", 4)],
)
def test_a_created_scheduler_is_torchs_and_follows_the_schedule_of_that_name(name, warmup_steps):
    optimizer = optimizer_at(0.1)
    keywords = NEEDED.get(name, {})
    scheduler = create_scheduler(optimizer, name, 5, 8, warmup_steps, **keywords)
    assert isinstance(scheduler, lr_scheduler.LRScheduler)
    schedule = build_schedule(name, 0.1, total_steps=40, warmup_steps=warmup_steps, **keywords)
    expected = [schedule.get_lr(step) for step in range(60)]
    assert first_group(used_rates(scheduler, 60)) == pytest.approx(expected, rel=1e-14, abs=0)


def test_a_created_cosine_with_warm_up_is_the_one_of_transformers():
    ours = rates_of(lambda it: create_scheduler(it, "cosine", 10, 100, 50, min_lr_ratio=0), 0.1, 1000)
    theirs = rates_of(lambda it: transformers.get_cosine_schedule_with_warmup(it, 50, 1000), 0.1, 1000)
    assert ours == pytest.approx(theirs, rel=0, abs=1e-12)


def test_a_created_scheduler_keeps_the_ratios_of_the_groups():
    optimizer = optimizer_at(0.5, 0.05, 1.0, default=0.5)
    scheduler = create_scheduler(optimizer, "linear", 1, 4, warmup_steps=2)
    rates = used_rates(scheduler, 5)
    assert rates == [pytest.approx([share * 0.5, share * 0.05, share * 1.0]) for share in (0.0, 0.5, 1.0, 0.5, 0.0)]


def test_a_created_scheduler_fills_a_tensor_rate_in_place():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(1.0), foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    scheduler = create_scheduler(optimizer, "linear", 1, 4)
    assert first_group(used_rates(scheduler, 5)) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert optimizer.param_groups[0]["lr"] is rate


def test_torchs_names_of_the_cosine_parameters_are_understood():
    schedule = create_scheduler(
        optimizer_at(1.0), "cosine_with_restarts", 2, 10, T_0=3, T_mult=2, eta_min=0.25
    ).schedule
    assert schedule == build_schedule(
        "cosine_with_restarts", 1.0, total_steps=20, first_cycle=3, multiplier=2, min_lr=0.25
    )
    half = create_scheduler(optimizer_at(1.0), "cosine_with_restarts", 2, 10).schedule
    assert half.first_cycle == 10
    assert create_scheduler(optimizer_at(1.0), "cosine", 2, 10, eta_min=0.25).schedule == Cosine(1.0, 20, 0.25)
    warm = create_scheduler(optimizer_at(1.0), "constant", 2, 10, 4, warmup_strategy="exponential").schedule
    assert warm.parts[0][0] == Warmup(1.0, 4, "exponential")


@pytest.mark.parametrize("name", NAMES)
def test_a_created_scheduler_continues_from_its_state(name):
    def make():
        return create_scheduler(optimizer_at(0.5, 0.05, default=0.5), name, 5, 4, **NEEDED.get(name, {}))

    whole = used_rates(make(), 20)
    first, second = make(), make()
    before = used_rates(first, 7)
    second.load_state_dict(through_a_checkpoint(first.state_dict()))
    assert before + used_rates(second, 13) == whole


def test_the_state_of_another_schedule_is_refused_and_nothing_changes():
    scheduler = create_scheduler(optimizer_at(0.1), "cosine", 5, 4)
    other = create_scheduler(optimizer_at(0.1), "cosine", 5, 5)
    used_rates(other, 3)
    with pytest.raises(CheckpointError, match=r"schedule\.total_steps is 25 in the state and 20 here"):
        scheduler.load_state_dict(other.state_dict())
    with pytest.raises(CheckpointError, match="'Cosine' here"):
        scheduler.load_state_dict(lr_scheduler.StepLR(optimizer_at(0.1), 1).state_dict())
    assert scheduler.last_epoch == 0


def test_a_created_scheduler_can_be_pickled_and_copied():
    scheduler = create_scheduler(optimizer_at(0.1), "cosine", 5, 4, warmup_steps=4)
    used_rates(scheduler, 5)
    for twin in (pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)):
        assert twin.get_last_lr() == scheduler.get_last_lr()
        assert twin.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "cosin"}, r"create_scheduler\(name='cosin'\): unknown; choose one of constant, .*mean 'cosine'\?"),
        ({"max_epochs": 0}, r"create_scheduler\(max_epochs=0\): needs a whole number of at least 1"),
        ({"max_epochs": 1.5}, r"create_scheduler\(max_epochs=1.5\): needs a whole number"),
        ({"steps_per_epoch": -1}, r"create_scheduler\(steps_per_epoch=-1\): needs a whole number"),
        ({"steps_per_epoch": None}, r"create_scheduler\(steps_per_epoch=None\): needs a whole number"),
        ({"steps_per_epoch": True}, r"create_scheduler\(steps_per_epoch=True\): needs a whole number"),
        ({"warmup_steps": 10}, r"create_scheduler\(warmup_steps=10\): leaves nothing of total_steps=10"),
        ({"warmup_steps": -1}, r"create_scheduler\(warmup_steps=-1\): needs a whole number"),
        ({"gamma": 0.1}, r"create_scheduler\(gamma=0.1\): unknown to the schedule 'cosine'; it takes min_lr"),
        ({"T_0": 5}, r"create_scheduler\(T_0=5\): unknown to the schedule 'cosine'"),
        ({"eta_min": 0.0, "min_lr": 0.0}, r"create_scheduler\(eta_min=0.0\): min_lr means the same"),
        ({"name": "step"}, r"create_scheduler\(name='step'\): needs step_size"),
        ({"optimizer": optimizer_at(0.0)}, r"create_scheduler\(optimizer=SGD\): its default learning rate is 0"),
    ],
)
def test_a_bad_request_is_refused_by_argument_and_value(arguments, message):
    request = {"optimizer": optimizer_at(0.1), "name": "cosine", "max_epochs": 2, "steps_per_epoch": 5, **arguments}
    with pytest.raises(ConfigurationError, match=message):
        create_scheduler(**request)


def test_what_is_not_an_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"create_scheduler\(optimizer='adam'\): needs a torch.optim.Optimizer"):
        create_scheduler("adam", "cosine", 2, 5)


# -------------------------------------------------------------------------------------------- update_optimizer


def group_rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_groups_keep_their_ratio_to_the_default_rate():
    optimizer = optimizer_at(0.5, 0.25, 2.0, default=0.5)
    update_optimizer(optimizer, 1.0)
    assert group_rates(optimizer) == [1.0, 0.5, 4.0]
    update_optimizer(optimizer, 0.0)
    update_optimizer(optimizer, 0.25)  # the ratios outlive a rate of 0
    assert group_rates(optimizer) == [0.25, 0.125, 1.0]
    assert group_ratios(optimizer) == [1.0, 0.5, 4.0]


def test_the_ratios_travel_with_the_optimizers_state():
    first, second = optimizer_at(1.0, 0.5), optimizer_at(1.0, 0.5)
    update_optimizer(first, 0.25)
    second.load_state_dict(through_a_checkpoint(first.state_dict()))
    update_optimizer(second, 2.0)
    assert group_rates(second) == [2.0, 1.0]


def test_a_group_added_later_joins_with_its_own_ratio():
    optimizer = optimizer_at(1.0)
    update_optimizer(optimizer, 0.5)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 4.0})
    update_optimizer(optimizer, 0.25)
    assert group_rates(optimizer) == [0.25, 1.0]


def test_a_tensor_rate_that_all_groups_share_with_the_default_is_filled_again_and_again():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(2.0), foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    for new in (1.0, 0.5, 0.25):
        update_optimizer(optimizer, new)
        assert group_rates(optimizer) == [new, new]
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), "0.1", None])
def test_a_rate_that_no_optimizer_can_use_is_refused(rate):
    with pytest.raises(ConfigurationError, match=r"update_optimizer\(learning_rate=.*\): needs a finite number"):
        update_optimizer(optimizer_at(0.1), rate)


def test_a_rate_beyond_the_range_of_floats_is_named_with_its_remedy():
    message = r"update_optimizer\(learning_rate=inf\): needs a finite number .*; bound a schedule that grows forever"
    with pytest.raises(ConfigurationError, match=message):
        update_optimizer(optimizer_at(0.1), Exponential(0.1, 2.0).get_lr(5000))


@pytest.mark.parametrize("optimizer", [None, "adam", [torch.zeros(1)]])
def test_rates_of_what_is_not_an_optimizer_are_refused(optimizer):
    for ask in (lambda: update_optimizer(optimizer, 0.1), lambda: group_ratios(optimizer)):
        with pytest.raises(TypeError, match=r"update_optimizer\(optimizer=.*\): needs a torch.optim.Optimizer"):
            ask()


def test_kept_ratios_are_those_of_the_groups_as_they_are_now():
    optimizer = optimizer_at(1.0, 0.5)
    rates = GroupRates(optimizer)
    rates.write(2.0)
    assert group_rates(optimizer) == [2.0, 1.0]
    optimizer.param_groups[1]["initial_lr"] = 0.25  # as a new scheduler, or a user, does
    rates.write(2.0)
    assert group_rates(optimizer) == [2.0, 0.5]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 4.0})
    rates.write(2.0)
    assert group_rates(optimizer) == [2.0, 0.5, 8.0]
    other = optimizer_at(1.0, 3.0, 1.0)
    update_optimizer(other, 1.0)
    optimizer.load_state_dict(through_a_checkpoint(other.state_dict()))
    rates.write(0.5)
    assert group_rates(optimizer) == [0.5, 1.5, 0.5]
    optimizer.defaults["lr"] = 2.0
    rates.write(0.5)
    assert group_rates(optimizer) == [0.25, 0.75, 0.25]


def test_the_ratios_are_computed_once_while_nothing_changes(monkeypatch):
    rates = GroupRates(optimizer_at(1.0, 0.5))
    monkeypatch.setattr(
        "pulsetrain.engine.schedules.groups.group_ratios", lambda *arguments: pytest.fail("computed again")
    )
    for rate in (1.0, 0.5, 0.25):
        rates.write(rate)
        assert group_rates(rates.optimizer) == [rate, rate / 2]


def test_a_default_rate_of_zero_gives_no_ratios():
    optimizer = optimizer_at(0.5, default=0.0)
    with pytest.raises(ConfigurationError, match=r"update_optimizer\(optimizer=SGD\): its default learning rate is 0"):
        update_optimizer(optimizer, 0.1)
    assert "initial_lr" not in optimizer.param_groups[0]
    all_at_zero = optimizer_at(0.0, 0.0)
    update_optimizer(all_at_zero, 0.5)
    assert group_rates(all_at_zero) == [0.5, 0.5]
