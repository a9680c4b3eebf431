"""Schedules: one contract over all of them, the formulas by hand, and torch's own schedulers as a second opinion."""

import copy
import io
import json
import math
import pickle

import pytest
import torch
from ignite.handlers import create_lr_scheduler_with_warmup
from torch.optim import lr_scheduler

from engine.errors import CheckpointError, ConfigurationError
from engine.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    Linear,
    Schedule,
    Sequential,
    Step,
    Warmup,
    build_schedule,
)

ALL = [
    Constant(0.1),
    Constant(1),
    Linear(0.1, 100, min_lr=0.01),
    Linear(1, 100, min_lr=0),
    Step(0.1, 30),
    Step(1, 30, gamma=1),
    Cosine(0.1, 100),
    Cosine(0.1, 100, min_lr=0.02),
    CosineRestarts(0.1, 10),
    CosineRestarts(0.1, 10, multiplier=2, min_lr=0.01),
    Warmup(0.1, 10),
    Warmup(0.1, 10, strategy="exponential"),
    Warmup(0.1, 10) >> Cosine(0.1, 90),
    Sequential((Constant(0.1), 5), (Step(0.1, 10), 20), (Linear(0.01, 50), None)),
]
each_schedule = pytest.mark.parametrize("schedule", ALL, ids=repr)


def optimizer_at(rate):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def rates_of(make_scheduler, initial_lr, steps=1000):
    """What torch gives each of the first updates: the rate is read, the update made, the scheduler stepped."""
    optimizer = optimizer_at(initial_lr)
    scheduler = make_scheduler(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


# ------------------------------------------------------------------------------------------ the contract


@each_schedule
def test_the_same_step_gives_the_same_rate_in_any_order(schedule):
    forwards = [schedule.get_lr(step) for step in range(200)]
    backwards = [schedule.get_lr(step) for step in reversed(range(200))]
    assert forwards == backwards[::-1]


@each_schedule
def test_a_rate_is_a_finite_float_that_is_not_negative(schedule):
    for step in (0, 1, 5, 99, 100, 101, 10**9):
        rate = schedule.get_lr(step)
        assert type(rate) is float
        assert 0 <= rate < math.inf


@each_schedule
def test_a_schedule_is_a_schedule(schedule):
    assert isinstance(schedule, Schedule)


@each_schedule
def test_a_schedule_cannot_be_changed(schedule):
    with pytest.raises(AttributeError):
        schedule.initial_lr = 1.0


@each_schedule
def test_equal_parameters_make_equal_schedules_and_copies_are_equal(schedule):
    for twin in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule)), eval(repr(schedule))):
        assert twin == schedule
        assert hash(twin) == hash(schedule)


@each_schedule
def test_its_own_state_loads(schedule):
    before = [schedule.get_lr(step) for step in range(50)]
    schedule.load_state_dict(schedule.state_dict())
    assert [schedule.get_lr(step) for step in range(50)] == before


@each_schedule
def test_its_state_survives_json_and_a_checkpoint_without_pickle(schedule):
    buffer = io.BytesIO()
    torch.save(schedule.state_dict(), buffer)
    buffer.seek(0)
    schedule.load_state_dict(torch.load(buffer, weights_only=True))
    schedule.load_state_dict(json.loads(json.dumps(schedule.state_dict())))


@each_schedule
def test_the_state_of_every_other_schedule_is_refused(schedule):
    for other in ALL:
        if other == schedule:
            continue
        with pytest.raises(CheckpointError, match=r"in the state and .* here"):
            schedule.load_state_dict(other.state_dict())


@each_schedule
def test_a_state_with_a_parameter_too_many_or_too_few_is_refused(schedule):
    state = schedule.state_dict()
    with pytest.raises(CheckpointError, match="extra is 1 in the state and 'nothing' here"):
        schedule.load_state_dict({**state, "extra": 1})
    name = list(state)[-1]
    with pytest.raises(CheckpointError, match=rf"{name}.* is 'nothing' in the state and .* here"):
        schedule.load_state_dict({key: value for key, value in state.items() if key != name})


def test_a_refused_state_names_both_sides_deep_inside_a_composed_schedule():
    here = Warmup(0.1, 10) >> Cosine(0.1, 90)
    saved = Warmup(0.1, 10) >> Cosine(0.1, 190)
    with pytest.raises(CheckpointError) as caught:
        here.load_state_dict(saved.state_dict())
    assert "parts[1].schedule.total_steps is 190 in the state and 90 here" in str(caught.value)
    assert "parts[1].length is 190 in the state and 90 here" in str(caught.value)
    assert "target_lr" not in str(caught.value)


def test_what_is_no_state_is_refused():
    with pytest.raises(CheckpointError, match="needs what state_dict"):
        Constant(0.1).load_state_dict(None)


# --------------------------------------------------------------------------------------- formulas by hand


def test_constant_stays():
    assert [Constant(0.3).get_lr(step) for step in (0, 7, 10**6)] == [0.3, 0.3, 0.3]


def test_linear_falls_by_equal_parts_and_stays_at_the_minimum():
    assert [Linear(1.0, 4).get_lr(step) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [Linear(1.0, 4, min_lr=0.5).get_lr(step) for step in (0, 2, 4, 9)] == [1.0, 0.75, 0.5, 0.5]


def test_step_drops_after_each_step_size_updates():
    schedule = Step(1.0, step_size=3, gamma=0.5)
    assert [schedule.get_lr(step) for step in range(7)] == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]


def test_cosine_passes_the_middle_half_way_and_stays_at_the_minimum():
    schedule = Cosine(1.0, total_steps=4, min_lr=0.2)
    assert schedule.get_lr(0) == 1.0
    assert schedule.get_lr(1) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, abs=1e-15)
    assert schedule.get_lr(2) == pytest.approx(0.6, abs=1e-15)
    assert [schedule.get_lr(step) for step in (4, 5, 8)] == [0.2, 0.2, 0.2]


def test_cosine_restarts_begins_each_cycle_at_the_top():
    schedule = CosineRestarts(1.0, first_cycle=2)
    assert [schedule.get_lr(step) for step in range(5)] == pytest.approx([1.0, 0.5, 1.0, 0.5, 1.0])
    longer = CosineRestarts(1.0, first_cycle=2, multiplier=3)  # cycles of 2, 6, 18, 54 updates
    assert [step for step in range(80) if longer.get_lr(step) == 1.0] == [0, 2, 8, 26]
    assert longer.get_lr(2 + 3) == pytest.approx(0.5)


def test_cosine_restarts_finds_the_first_update_of_far_cycles_exactly():
    schedule = CosineRestarts(1.0, first_cycle=1, multiplier=10)
    start = sum(10**cycle for cycle in range(15))
    assert schedule.get_lr(start) == 1.0
    assert schedule.get_lr(start - 1) < 1e-12


def test_linear_warmup_reaches_the_target_after_warmup_steps():
    warmup = Warmup(target_lr=1.0, warmup_steps=4)
    assert [warmup.get_lr(step) for step in (0, 1, 2, 3, 4, 9)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_exponential_warmup_grows_with_the_square_of_the_steps():
    warmup = Warmup(target_lr=1.0, warmup_steps=4, strategy="exponential")
    assert [warmup.get_lr(step) for step in (0, 1, 2, 3, 4, 9)] == [0.0, 0.0625, 0.25, 0.5625, 1.0, 1.0]


# ----------------------------------------------------------------------------------------------- composing


def test_the_second_schedule_starts_counting_when_the_first_is_over():
    schedule = Warmup(1.0, 4) >> Linear(1.0, 4)
    assert [schedule.get_lr(step) for step in range(10)] == [0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_after_is_the_same_composition_read_from_the_other_side():
    assert Cosine(0.1, 90).after(Warmup(0.1, 10)) == Warmup(0.1, 10) >> Cosine(0.1, 90)
    assert Warmup(0.1, 10) >> Cosine(0.1, 90) == Sequential((Warmup(0.1, 10), 10), (Cosine(0.1, 90), 90))


def test_composing_is_associative_and_changes_no_operand():
    a, b, c = Warmup(0.1, 3), Linear(0.1, 5, 0.01), Cosine(0.01, 7)
    ab = a >> b
    assert (ab >> c) == (a >> (b >> c))
    assert ab == Sequential((a, 3), (b, 5))
    assert (ab >> c).length == 15


def test_a_schedule_without_an_end_can_only_come_last_unless_its_length_is_given():
    with pytest.raises(ConfigurationError, match=r"Sequential\(part 0=\(Constant\(initial_lr=0.1\), None\)\): needs"):
        Constant(0.1) >> Linear(0.1, 10)
    schedule = Sequential((Constant(0.1), 5), (Linear(0.1, 10), None))
    assert [schedule.get_lr(step) for step in (0, 4, 5, 15, 99)] == [0.1, 0.1, 0.1, 0.0, 0.0]
    assert schedule.length is None


def test_a_schedule_written_elsewhere_composes():
    class Halving:
        def get_lr(self, step):
            return 0.5**step

        def state_dict(self):
            return {"type": "Halving"}

        def load_state_dict(self, state): ...

    schedule = Warmup(1.0, 2) >> Halving()
    assert [schedule.get_lr(step) for step in range(5)] == [0.0, 0.5, 1.0, 0.5, 0.25]
    schedule.load_state_dict(schedule.state_dict())


def test_composing_with_what_is_no_schedule_is_an_error():
    with pytest.raises(TypeError, match="unsupported operand"):
        Warmup(0.1, 10) >> 0.1
    with pytest.raises(ConfigurationError, match=r"Sequential\(\): needs at least 1 part"):
        Sequential()
    with pytest.raises(ConfigurationError, match=r"part 0=.*needs a pair \(schedule, length\)"):
        Sequential(Cosine(0.1, 10))


# ---------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(0.1, 0), r"Cosine\(total_steps=0\): needs at least 1 optimizer update"),
        (lambda: Cosine(0.1, 2.5), r"Cosine\(total_steps=2.5\): needs a whole number"),
        (lambda: Cosine(0.1, True), r"Cosine\(total_steps=True\): needs a whole number"),
        (lambda: Cosine(0.1, 10, 0.2), r"Cosine\(min_lr=0.2\): is above initial_lr=0.1"),
        (lambda: Linear(-0.1, 10), r"Linear\(initial_lr=-0.1\): needs a finite number that is not negative"),
        (lambda: Linear(0.1, -1), r"Linear\(total_steps=-1\): needs at least 1"),
        (lambda: Constant(math.nan), r"Constant\(initial_lr=nan\): needs a finite number"),
        (lambda: Constant("1e-3"), r"Constant\(initial_lr='1e-3'\): needs a finite number"),
        (lambda: Step(0.1, 0), r"Step\(step_size=0\): needs at least 1"),
        (lambda: Step(0.1, 1, gamma=math.inf), r"Step\(gamma=inf\): needs a finite number"),
        (lambda: CosineRestarts(0.1, 0), r"CosineRestarts\(first_cycle=0\): needs at least 1"),
        (lambda: CosineRestarts(0.1, 1, 0), r"CosineRestarts\(multiplier=0\): needs at least 1"),
        (lambda: CosineRestarts(0.1, 1, 1.5), r"CosineRestarts\(multiplier=1.5\): needs a whole number"),
        (lambda: Warmup(0.1, 0), r"Warmup\(warmup_steps=0\): needs at least 1"),
        (lambda: Warmup(0.1, 5, "linaer"), r"Warmup\(strategy='linaer'\): unknown; .*did you mean 'linear'\?"),
        (lambda: Sequential((Cosine(0.1, 5), 0)), r"part 0=.*needs the length in updates, at least 1"),
    ],
)
def test_a_bad_parameter_is_refused_at_construction_by_place_argument_and_value(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


# ------------------------------------------------------------------------------------ parity with torch
# Convention: torch's rate after n calls of step() is ours at n, the number of updates made.


@pytest.mark.parametrize(
    ("schedule", "make_scheduler"),
    [
        (Constant(0.1), lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        (Step(0.1, 30, 0.7), lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.7)),
        # LinearLR speaks of factors of the initial rate, and stays at the last one as ours does
        (Linear(0.1, 600, 0.01), lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=600)),
        # CosineAnnealingLR climbs again after T_max, where ours stays at min_lr: compared up to there
        (Cosine(0.1, 1000, 0.001), lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 1000, eta_min=0.001)),
        (CosineRestarts(0.1, 37), lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 37)),
        (
            CosineRestarts(0.1, 10, 3, 0.001),
            lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10, T_mult=3, eta_min=0.001),
        ),
        # LinearLR cannot start at 0, so the warm-up is torch's LambdaLR
        (
            Warmup(0.1, 50) >> Cosine(0.1, 950, 0.001),
            lambda optimizer: lr_scheduler.SequentialLR(
                optimizer,
                [
                    lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 50, 1.0)),
                    lr_scheduler.CosineAnnealingLR(optimizer, 950, eta_min=0.001),
                ],
                milestones=[50],
            ),
        ),
    ],
    ids=lambda value: repr(value) if isinstance(value, Schedule) else "",
)
@pytest.mark.filterwarnings(
    r"ignore:The epoch parameter in `scheduler.step\(\)`:UserWarning"
)  # from SequentialLR itself
def test_a_thousand_rates_agree_with_torch(schedule, make_scheduler):
    theirs = rates_of(make_scheduler, initial_lr=0.1)
    ours = [schedule.get_lr(step) for step in range(1000)]
    assert ours == pytest.approx(theirs, rel=0, abs=1e-12)


# --------------------------------------------------------------------------------- the first update's rate


def test_the_first_update_runs_at_the_rate_of_the_warm_up():
    schedule = Cosine(0.1, 8).after(Warmup(0.1, 4))
    optimizer = optimizer_at(0.1)
    rates = []
    for updates_made in range(6):
        optimizer.param_groups[0]["lr"] = schedule.get_lr(updates_made)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    assert rates[:5] == pytest.approx([0.0, 0.025, 0.05, 0.075, 0.1])


def test_with_ignite_the_first_update_runs_at_the_optimizers_own_rate_before_its_warm_up():
    def with_warmup(optimizer):
        scheduler = create_lr_scheduler_with_warmup(
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=8), warmup_start_value=0.0, warmup_duration=4
        )
        scheduler.step = lambda: scheduler(None)
        return scheduler

    rates = rates_of(with_warmup, initial_lr=0.1, steps=5)
    assert rates[0] == 0.1, "ignite sets the rate of the first update now: say so where its fault is described"
    assert rates[1:] == pytest.approx([0.0, 0.1 / 3, 0.2 / 3, 0.1])  # the warm-up, one update late


# ------------------------------------------------------------------------------------------- build_schedule


def test_decay_spans_what_the_warm_up_leaves():
    assert build_schedule("cosine", 0.1, total_steps=100, warmup_steps=10) == Warmup(0.1, 10) >> Cosine(
        0.1, 90, min_lr=0.1 * 0.1
    )
    schedule = build_schedule("linear", 1.0, total_steps=100, warmup_steps=20, min_lr_ratio=0.5)
    assert [schedule.get_lr(step) for step in (0, 10, 20, 60, 100)] == [0.0, 0.5, 1.0, 0.75, 0.5]


def test_each_name_builds_its_schedule():
    assert build_schedule("constant", 0.1, total_steps=None) == Constant(0.1)
    assert build_schedule("linear", 0.1, total_steps=50, min_lr=0.0) == Linear(0.1, 50, 0.0)
    assert build_schedule("cosine", 0.1, total_steps=50, min_lr_ratio=0.0) == Cosine(0.1, 50)
    assert build_schedule("cosine_with_restarts", 1.0, total_steps=50) == CosineRestarts(1.0, 50, min_lr=0.1)
    assert build_schedule("cosine_with_restarts", 1.0, total_steps=None, first_cycle=5, multiplier=2) == CosineRestarts(
        1.0, 5, 2, min_lr=0.1
    )
    assert build_schedule("step", 0.1, total_steps=None, step_size=3, gamma=0.5) == Step(0.1, 3, 0.5)
    assert build_schedule("constant", 0.1, total_steps=None, warmup_steps=4, warmup_strategy="exponential") == Warmup(
        0.1, 4, "exponential"
    ) >> Constant(0.1)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cosin", {}, r"build_schedule\(name='cosin'\): unknown; choose one of constant, .*did you mean 'cosine'\?"),
        ("cosine", {"total_steps": None}, r"build_schedule\(total_steps=None\): the schedule 'cosine' falls over"),
        ("linear", {"total_steps": None}, r"build_schedule\(total_steps=None\): the schedule 'linear'"),
        ("cosine", {"warmup_steps": 100}, r"build_schedule\(warmup_steps=100\): leaves nothing of total_steps=100"),
        ("constant", {"warmup_steps": 101}, r"build_schedule\(warmup_steps=101\): leaves nothing"),
        ("cosine", {"warmup_steps": -1}, r"build_schedule\(warmup_steps=-1\): needs a whole number"),
        ("cosine", {"warmup_steps": 1, "warmup_strategy": "cubic"}, r"Warmup\(strategy='cubic'\): unknown"),
        ("cosine", {"min_lr_ratio": 1.5}, r"build_schedule\(min_lr_ratio=1.5\): needs a part of learning_rate"),
        ("cosine", {"gamma": 0.5}, r"build_schedule\(gamma=0.5\): unknown to the schedule 'cosine'; it takes min_lr"),
        ("step", {}, r"build_schedule\(name='step'\): needs step_size"),
        ("cosine", {"total_steps": 0}, r"build_schedule\(warmup_steps=0\): leaves nothing of total_steps=0"),
    ],
)
def test_a_bad_request_is_refused_by_argument_and_value(name, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        build_schedule(name, 0.1, **{"total_steps": 100, **arguments})


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan, "0.1", None])
def test_a_learning_rate_that_is_no_positive_number_is_refused(rate):
    with pytest.raises(ConfigurationError, match=r"build_schedule\(learning_rate="):
        build_schedule("cosine", rate, total_steps=10)
