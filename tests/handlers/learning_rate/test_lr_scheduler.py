from collections import Counter

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.optim import lr_scheduler

from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.schedules import Cosine, Exponential, Linear, Step, Warmup, add_warmup, create_scheduler
from pulsetrain.handlers import LRScheduler
from tests.support.engines import UpdatingEngine, make_engine


class Halving:
    """get_lr(step) = 2 ** -step: exact, so that rates compare by ==."""

    def get_lr(self, step):
        return 2.0**-step

    def state_dict(self):
        return {"type": "Halving"}

    def load_state_dict(self, state):
        if state != self.state_dict():
            raise CheckpointError(f"another schedule: {state}")


def sgd(*rates, default=1.0):
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=default)


def test_the_first_update_uses_the_rate_of_step_zero():
    engine = UpdatingEngine()
    LRScheduler(Halving()).attach(engine)
    engine.run([0] * 4, max_epochs=1)
    assert engine.used == [[1.0], [0.5], [0.25], [0.125]]


def test_a_warmup_starts_at_zero_and_reaches_its_target_after_its_steps():
    engine = UpdatingEngine()
    LRScheduler(Warmup(target_lr=1.0, warmup_steps=4)).attach(engine)
    engine.run([0] * 6, max_epochs=1)
    assert engine.used == [[0.0], [0.25], [0.5], [0.75], [1.0], [1.0]]


def test_by_update_counts_updates_and_not_batches():
    engine = UpdatingEngine(accumulate=2)
    LRScheduler(Halving()).attach(engine)
    engine.run([0] * 6, max_epochs=1)
    assert engine.used == [[1.0], [0.5], [0.25]]


def test_by_epoch_changes_the_rate_between_epochs_only():
    engine = UpdatingEngine()
    LRScheduler(Halving(), by="epoch").attach(engine)
    engine.run([0, 0], max_epochs=3)
    assert engine.used == [[1.0], [1.0], [0.5], [0.5], [0.25], [0.25]]


def test_by_iteration_counts_batches():
    engine = UpdatingEngine(accumulate=2)
    LRScheduler(Halving(), by="iteration").attach(engine)
    engine.run([0] * 4, max_epochs=1)
    assert engine.used == [[0.5], [0.125]]


def test_groups_keep_their_ratio_to_the_default_rate():
    engine = UpdatingEngine(sgd(0.5, 0.05, default=0.5))
    LRScheduler(Halving()).attach(engine)
    engine.run([0, 0], max_epochs=1)
    assert engine.used == [pytest.approx([1.0, 0.1]), pytest.approx([0.5, 0.05])]


def test_attaching_again_keeps_the_ratios_of_the_groups_first_rates():
    engine = UpdatingEngine(sgd(1.0, 0.5))
    LRScheduler(Halving()).attach(engine).detach()
    engine.optimizer.param_groups[1]["lr"] = 123.0
    LRScheduler(Halving()).attach(engine)
    engine.run([0], max_epochs=1)
    assert engine.used == [[1.0, 0.5]]


def test_a_group_added_during_training_joins_with_its_own_ratio():
    optimizer = sgd(1.0)
    scheduler = LRScheduler(Halving(), optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 4.0})
    assert scheduler.step() == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]


def test_a_tensor_rate_is_written_in_place():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=torch.tensor(1.0), capturable=False, foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    LRScheduler(Halving(), optimizer).step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_a_tensor_rate_that_is_the_default_rate_too_is_written_at_every_step():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=torch.tensor(1.0), capturable=False, foreach=False)
    scheduler = LRScheduler(Halving(), optimizer)
    for expected in (0.5, 0.25, 0.125):
        assert scheduler.step() == expected
        assert optimizer.param_groups[0]["lr"].item() == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: add_warmup(torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5), 2),
        lambda optimizer: create_scheduler(optimizer, "step", 1, 6, warmup_steps=2, step_size=2, gamma=0.5),
    ],
    ids=["add_warmup", "create_scheduler"],
)
def test_a_torch_scheduler_with_a_warm_up_of_ours_is_stepped_and_resumed(make):
    whole, first, second = UpdatingEngine(), UpdatingEngine(), UpdatingEngine()
    LRScheduler(make(whole.optimizer)).attach(whole)
    whole.run([0] * 6, max_epochs=1)
    assert whole.used == [[0.0], [0.5], [1.0], [1.0], [0.5], [0.5]]
    before = LRScheduler(make(first.optimizer)).attach(first)
    first.run([0] * 3, max_epochs=1)
    LRScheduler(make(second.optimizer)).attach(second).load_state_dict(before.state_dict())
    second.run([0] * 3, max_epochs=1)
    assert first.used + second.used == whole.used


def test_a_torch_scheduler_is_stepped_after_each_update():
    def rates(attach):
        torch.manual_seed(0)
        engine = UpdatingEngine()
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=2, gamma=0.5)
        if attach:
            LRScheduler(scheduler).attach(engine)
            engine.run([0] * 5, max_epochs=1)
            return engine.used
        used = []
        for _ in range(5):
            used.append([engine.optimizer.param_groups[0]["lr"]])
            engine.optimizer.step()
            scheduler.step()
        return used

    assert rates(attach=True) == rates(attach=False) == [[1.0], [1.0], [0.5], [0.5], [0.25]]


class Halved:
    """A callable object, whose attributes torch saves."""

    def __init__(self):
        self.factor = 0.5

    def __call__(self, step):
        return self.factor**step


TORCHS = {
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda step: 0.5 / (1 + step)),
    "LambdaLR of an object": lambda it: lr_scheduler.LambdaLR(it, Halved()),
    "MultiplicativeLR": lambda it: lr_scheduler.MultiplicativeLR(it, lambda step: 0.95),
    "StepLR": lambda it: lr_scheduler.StepLR(it, 2, 0.5),
    "MultiStepLR": lambda it: lr_scheduler.MultiStepLR(it, [1, 3, 3, 7], 0.5),
    "ConstantLR": lambda it: lr_scheduler.ConstantLR(it, 0.5, 4),
    "LinearLR": lambda it: lr_scheduler.LinearLR(it, 0.5, 1.0, 8),
    "ExponentialLR": lambda it: lr_scheduler.ExponentialLR(it, 0.9),
    "PolynomialLR": lambda it: lr_scheduler.PolynomialLR(it, 12, 2.0),
    "CosineAnnealingLR": lambda it: lr_scheduler.CosineAnnealingLR(it, 9, eta_min=0.001),
    "CosineAnnealingWarmRestarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 3, 2),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, 0.4, 14),
    "CyclicLR": lambda it: lr_scheduler.CyclicLR(it, 0.01, 0.1, 3, cycle_momentum=False),
    "CyclicLR of a function": lambda it: lr_scheduler.CyclicLR(
        it, 0.01, 0.1, 3, scale_fn=lambda cycle: 0.5**cycle, cycle_momentum=False
    ),
    "SequentialLR": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.ConstantLR(it, 0.5, 9), lr_scheduler.MultiStepLR(it, [2, 3], 0.5)], [3]
    ),
    "ChainedScheduler": lambda it: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(it, 0.9), lr_scheduler.MultiStepLR(it, [2, 8], 0.5)]
    ),
}  # all of torch's but ReduceLROnPlateau, which LRScheduler refuses, and LRScheduler itself, which has no rates


def types_of(state):
    if isinstance(state, dict):
        return type(state), {key: types_of(item) for key, item in state.items()}
    return type(state), [types_of(item) for item in state] if isinstance(state, (list, tuple)) else None


@pytest.mark.filterwarnings(r"ignore:The epoch parameter in `scheduler.step\(\)`:UserWarning")  # torch's SequentialLR
@pytest.mark.parametrize("warmup_steps", [0, 4])
@pytest.mark.parametrize("name", TORCHS)
def test_every_scheduler_of_torchs_continues_from_a_checkpoint(name, warmup_steps, tmp_path):
    def make():
        engine = UpdatingEngine()
        scheduler = TORCHS[name](engine.optimizer)
        handler = LRScheduler(add_warmup(scheduler, warmup_steps) if warmup_steps else scheduler)
        return engine, handler.attach(engine)

    (whole, _), (first, before), (second, after) = make(), make(), make()
    whole.run([0] * 14, max_epochs=1)
    first.run([0] * 6, max_epochs=1)
    manager = CheckpointManager(tmp_path)
    path = manager.save({"optimizer": first.optimizer.state_dict(), "handler": before.state_dict()})
    loaded = manager.load(path)
    second.optimizer.load_state_dict(loaded["optimizer"])
    after.load_state_dict(loaded["handler"])
    assert types_of(after.schedule.state_dict()) == types_of(before.schedule.state_dict())
    second.run([0] * 8, max_epochs=1)
    assert first.used + second.used == whole.used


def test_a_loaded_state_shares_nothing_with_the_scheduler_that_gave_it():
    first, second = (LRScheduler(TORCHS["MultiStepLR"](sgd(1.0))) for _ in range(2))
    second.load_state_dict(first.state_dict())
    second.schedule.milestones[9] = 1
    assert first.schedule.milestones == Counter([1, 3, 3, 7])


def test_a_schedule_that_grows_for_ever_is_refused_where_its_rate_is_infinite():
    optimizer = sgd(1.0)
    scheduler = LRScheduler(Exponential(1.0, 1e200), optimizer)
    assert scheduler.step() == 1e200
    with pytest.raises(ConfigurationError, match=r"LRScheduler\(learning_rate=inf\): needs a finite number"):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1e200


def test_the_ratios_of_a_state_that_is_loaded_into_the_optimizer_later_are_followed():
    optimizer, other = sgd(1.0, 0.5), sgd(1.0, 4.0)
    scheduler = LRScheduler(Halving(), optimizer)
    scheduler.step()
    LRScheduler(Halving(), other)
    optimizer.load_state_dict(other.state_dict())
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 1.0]


def test_step_by_hand_returns_the_new_rate():
    scheduler = LRScheduler(Halving(), sgd(1.0))
    assert [scheduler.step(), scheduler.step()] == [0.5, 0.25]
    assert scheduler.get_last_lr() == 0.25


def test_step_by_hand_needs_an_optimizer():
    with pytest.raises(RuntimeError, match=r"LRScheduler.step\(\): no optimizer"):
        LRScheduler(Halving()).step()


def test_a_resumed_run_uses_the_rates_of_one_that_was_never_stopped():
    whole, first, second = UpdatingEngine(), UpdatingEngine(), UpdatingEngine()
    LRScheduler(Cosine(initial_lr=1.0, total_steps=6)).attach(whole)
    whole.run([0] * 6, max_epochs=1)
    before = LRScheduler(Cosine(initial_lr=1.0, total_steps=6)).attach(first)
    first.run([0] * 3, max_epochs=1)
    LRScheduler(Cosine(initial_lr=1.0, total_steps=6)).attach(second).load_state_dict(before.state_dict())
    second.run([0] * 3, max_epochs=1)
    assert first.used + second.used == whole.used


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (Cosine(initial_lr=1.0, total_steps=6), Cosine(initial_lr=1.0, total_steps=7)),
        (Cosine(initial_lr=1.0, total_steps=6), Linear(initial_lr=1.0, total_steps=6)),
        (
            torch.optim.lr_scheduler.StepLR(sgd(1.0), step_size=1),
            torch.optim.lr_scheduler.CosineAnnealingLR(sgd(1.0), T_max=3),
        ),
    ],
)
def test_the_state_of_another_schedule_is_refused_and_the_counter_stays(mine, other):
    scheduler = LRScheduler(mine)
    saved = {**LRScheduler(other).state_dict(), "step": 5}
    with pytest.raises(CheckpointError):
        scheduler.load_state_dict(saved)
    assert scheduler.state_dict()["step"] == 0


def test_an_engine_without_an_optimizer_is_an_error_when_attaching():
    with pytest.raises(ValueError, match=r"LRScheduler\(optimizer=None\): 'trainer' has no torch optimizer; pass"):
        LRScheduler(Halving()).attach(make_engine())


def test_a_torch_scheduler_of_another_optimizer_is_an_error():
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(1.0), step_size=1)
    with pytest.raises(ValueError, match="another optimizer"):
        LRScheduler(scheduler).attach(UpdatingEngine())
    with pytest.raises(ValueError, match="another optimizer"):
        LRScheduler(scheduler, optimizer=sgd(1.0))


def test_groups_with_rates_of_their_own_need_a_default_rate():
    with pytest.raises(ValueError, match="default learning rate is 0"):
        LRScheduler(Halving(), sgd(0.5, default=0.0))
    optimizer = sgd(0.0, default=0.0)
    LRScheduler(Halving(), optimizer).step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_step_that_reports_no_update_is_reported_at_the_end():
    engine = make_engine()
    LRScheduler(Halving(), sgd(1.0)).attach(engine)
    with capture_logs() as logs:
        engine.run([0], max_epochs=1)
    assert "OPTIMIZER_STEP_COMPLETED" in logs[0]["event"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"schedule": 0.1}, TypeError, r"LRScheduler\(schedule=0.1\): needs a schedule"),
        ({"schedule": Step(1.0, 2, 0.5), "by": "batch"}, ValueError, r"LRScheduler\(by='batch'\): unknown; choose one"),
        (
            {"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(1.0))},
            TypeError,
            "ReduceLROnPlateau.*follows a metric",
        ),
        (
            {"schedule": add_warmup(torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(1.0)), 5)},
            TypeError,
            "ReduceLROnPlateau.*follows a metric",
        ),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments, error, message):
    with pytest.raises(error, match=message):
        LRScheduler(**arguments)
