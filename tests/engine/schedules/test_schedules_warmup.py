"""add_warmup: a warm-up before any scheduler of torch's."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch.optim import lr_scheduler

from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.schedules import Cosine, add_warmup, create_scheduler
from tests.support.schedulers import first_group, optimizer_at, rates_of, through_a_checkpoint, used_rates

INNER = {
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda step: 0.5 / (1 + step)),  # begins at half the rate
    "StepLR": lambda it: lr_scheduler.StepLR(it, 2, 0.5),
    "MultiStepLR": lambda it: lr_scheduler.MultiStepLR(it, [1, 3], 0.5),
    "ExponentialLR": lambda it: lr_scheduler.ExponentialLR(it, 0.9),
    "LinearLR": lambda it: lr_scheduler.LinearLR(it, 0.5, 1.0, 4),
    "PolynomialLR": lambda it: lr_scheduler.PolynomialLR(it, 8, 2.0),
    "CosineAnnealingLR": lambda it: lr_scheduler.CosineAnnealingLR(it, 9, eta_min=0.001),
    "CosineAnnealingWarmRestarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 3, 2),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, [0.4, 0.04], 12),
    "CyclicLR": lambda it: lr_scheduler.CyclicLR(it, 0.01, 0.1, 3),
    "ChainedScheduler": lambda it: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(it, 0.9), lr_scheduler.StepLR(it, 2, 0.5)]
    ),
    "SequentialLR": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.ConstantLR(it, 0.5, 9), lr_scheduler.ExponentialLR(it, 0.9)], [3]
    ),
    "ReduceLROnPlateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, factor=0.5, patience=1),
    "ours": lambda it: create_scheduler(it, "cosine", 2, 5),
}
METRIC = {"ReduceLROnPlateau": (1.0,)}
# torch's own SequentialLR warns when it hands over
let_torch_warn = pytest.mark.filterwarnings(r"ignore:The epoch parameter in `scheduler.step\(\)`:UserWarning")


def two_groups():
    return optimizer_at(0.4, 0.04)


@let_torch_warn
@pytest.mark.parametrize("name", INNER)
def test_after_its_warm_up_a_scheduler_begins_at_its_own_step_zero(name):
    plain = used_rates(INNER[name](two_groups()), 10, *METRIC.get(name, ()))
    warmed = used_rates(add_warmup(INNER[name](two_groups()), 4), 14, *METRIC.get(name, ()))
    first = plain[0]
    assert warmed[:4] == [pytest.approx([rate * share for rate in first]) for share in (0.0, 0.25, 0.5, 0.75)]
    assert warmed[4:] == plain


@let_torch_warn
@pytest.mark.parametrize("stop", [0, 2, 4, 7])
@pytest.mark.parametrize("name", INNER)
def test_a_warmed_scheduler_continues_from_its_state(name, stop):
    def make():
        return add_warmup(INNER[name](two_groups()), 4)

    metric = METRIC.get(name, ())
    whole = used_rates(make(), 14, *metric)
    first, second = make(), make()
    before = used_rates(first, stop, *metric)
    second.load_state_dict(through_a_checkpoint(first.state_dict()))
    assert second.get_last_lr() == first.get_last_lr() == whole[stop]
    assert before + used_rates(second, 14 - stop, *metric) == whole


def test_a_warm_up_before_a_step_scheduler_by_hand():
    scheduler = add_warmup(lr_scheduler.StepLR(optimizer_at(1.0), 2, 0.5), 2)
    assert isinstance(scheduler, lr_scheduler.LRScheduler)
    assert scheduler.get_last_lr() == [0.0]
    assert first_group(used_rates(scheduler, 7)) == [0.0, 0.5, 1.0, 1.0, 0.5, 0.5, 0.25]
    assert scheduler.get_last_lr() == [0.25]


def test_an_exponential_warm_up_grows_with_the_square():
    scheduler = add_warmup(lr_scheduler.ConstantLR(optimizer_at(1.0), 1.0), 4, "exponential")
    assert first_group(used_rates(scheduler, 6)) == [0.0, 0.0625, 0.25, 0.5625, 1.0, 1.0]


def test_a_warmed_cosine_makes_the_updates_of_the_one_of_transformers():
    ours = rates_of(lambda it: add_warmup(lr_scheduler.CosineAnnealingLR(it, 950), 50), 0.1, 1000)
    theirs = rates_of(lambda it: transformers.get_cosine_schedule_with_warmup(it, 50, 1000), 0.1, 1000)
    assert ours == pytest.approx(theirs, rel=0, abs=1e-12)


def test_a_warm_up_added_to_a_created_scheduler_is_the_one_that_it_is_created_with():
    added = rates_of(lambda it: add_warmup(create_scheduler(it, "cosine", 1, 90), 10), 0.1, 120)
    created = rates_of(lambda it: create_scheduler(it, "cosine", 1, 100, warmup_steps=10), 0.1, 120)
    assert added == pytest.approx(created, rel=1e-14)


def test_a_plateau_scheduler_takes_its_metric_once_the_warm_up_is_over():
    scheduler = add_warmup(lr_scheduler.ReduceLROnPlateau(optimizer_at(1.0), factor=0.5, patience=0), 2)
    rates = used_rates(scheduler, 2)  # a warm-up needs no metric
    rates += used_rates(scheduler, 3, 1.0)  # the first is the best so far, the next two are no better
    assert first_group(rates) == [0.0, 0.5, 1.0, 1.0, 0.5]
    assert scheduler.get_last_lr() == [0.25]
    with pytest.raises(TypeError, match="metrics"):
        scheduler.step()


def test_a_warm_up_works_inside_torchs_sequential_scheduler():
    optimizer = optimizer_at(1.0)
    warmed = add_warmup(lr_scheduler.StepLR(optimizer, 2, 0.5), 2)
    sequence = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer, 1.0), warmed], [3])
    assert first_group(used_rates(sequence, 9)) == [1.0, 1.0, 1.0, 0.0, 0.5, 1.0, 1.0, 0.5, 0.5]


def test_a_warm_up_fills_a_tensor_rate_in_place():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(1.0), foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    scheduler = add_warmup(lr_scheduler.StepLR(optimizer, 2, 0.5), 2)
    rates = used_rates(scheduler, 3)
    second = scheduler.get_last_lr()
    assert first_group(rates + used_rates(scheduler, 2)) == [0.0, 0.5, 1.0, 1.0, 0.5]
    assert optimizer.param_groups[0]["lr"] is rate
    assert second == [1.0]  # a copy, which later steps leave alone


def test_the_state_of_a_warmed_scheduler_is_plain():
    scheduler = add_warmup(lr_scheduler.StepLR(two_groups(), 2, 0.5), 4)
    assert json.loads(json.dumps(scheduler.state_dict())) == scheduler.state_dict()


def test_loading_writes_the_rates_into_an_optimizer_that_was_restored_first():
    first = add_warmup(lr_scheduler.ExponentialLR(optimizer_at(1.0), 0.5), 2)
    used_rates(first, 4)
    optimizer = optimizer_at(1.0)
    optimizer.load_state_dict(first.optimizer.state_dict())
    second = add_warmup(lr_scheduler.ExponentialLR(optimizer, 0.5), 2)  # writes rate 0
    second.load_state_dict(first.state_dict())
    assert used_rates(second, 3) == used_rates(first, 3) == [[0.25], [0.125], [0.0625]]


def test_the_state_of_another_warm_up_is_refused_naming_both_sides():
    scheduler = add_warmup(lr_scheduler.StepLR(optimizer_at(1.0), 2), 4)
    longer = add_warmup(lr_scheduler.StepLR(optimizer_at(1.0), 2), 5)
    other = add_warmup(lr_scheduler.ExponentialLR(optimizer_at(1.0), 0.5), 4)
    with pytest.raises(CheckpointError, match=r"WarmupLR.*warmup.warmup_steps is 5 in the state and 4 here"):
        scheduler.load_state_dict(longer.state_dict())
    with pytest.raises(CheckpointError, match="before is 'ExponentialLR' in the state and 'StepLR' here"):
        scheduler.load_state_dict(other.state_dict())
    with pytest.raises(CheckpointError, match="WarmupLR"):
        scheduler.load_state_dict(lr_scheduler.StepLR(optimizer_at(1.0), 2).state_dict())


@let_torch_warn
@pytest.mark.parametrize("name", INNER)
def test_a_scheduler_that_has_been_stepped_is_refused(name):
    scheduler = INNER[name](two_groups())
    used_rates(scheduler, 1, *METRIC.get(name, ()))
    message = rf"add_warmup\(scheduler={type(scheduler).__name__}\): has been stepped already"
    with pytest.raises(ConfigurationError, match=message):
        add_warmup(scheduler, 4)


def test_a_scheduler_that_begins_at_zero_is_refused():
    scheduler = create_scheduler(optimizer_at(0.1), "cosine", 1, 100, warmup_steps=10)
    with pytest.raises(ConfigurationError, match=r"add_warmup\(scheduler=ScheduleLR\): starts at rate 0"):
        add_warmup(scheduler, 10)


def test_wrong_arguments_of_a_warm_up_are_refused():
    with pytest.raises(TypeError, match=r"add_warmup\(scheduler=Cosine\(.*\): needs a torch LRScheduler"):
        add_warmup(Cosine(0.1, 10), 4)
    with pytest.raises(ConfigurationError, match=r"Warmup\(warmup_steps=0\): needs at least 1"):
        add_warmup(lr_scheduler.StepLR(optimizer_at(0.1), 2), 0)
    with pytest.raises(ConfigurationError, match=r"Warmup\(strategy='cosine'\): unknown"):
        add_warmup(lr_scheduler.StepLR(optimizer_at(0.1), 2), 4, "cosine")
