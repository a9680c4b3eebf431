"""The contract that every schedule keeps, and composing them."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import random

import pytest
import torch

from pulsetrain.engine import schedules
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    InverseSqrt,
    Linear,
    MultiStep,
    OneCycle,
    Polynomial,
    Scaled,
    Schedule,
    Sequential,
    Step,
    Warmup,
)

# each with its length
LENGTHS = {
    Constant(0.1): None,
    Constant(1): None,
    Linear(0.1, 100, min_lr=0.01): 100,
    Linear(1, 100, min_lr=0): 100,
    Polynomial(0.1, 100): 100,
    Polynomial(0.1, 100, power=0.5, min_lr=0.01): 100,
    Step(0.1, 30): None,
    Step(1, 30, gamma=1): None,
    MultiStep(0.1, (30,)): None,
    MultiStep(0.1, (30, 60), gamma=0.5): None,
    Exponential(0.1, 0.99): None,
    Cosine(0.1, 100): 100,
    Cosine(0.1, 100, min_lr=0.02): 100,
    CosineRestarts(0.1, 10): None,
    CosineRestarts(0.1, 10, multiplier=2, min_lr=0.01): None,
    InverseSqrt(0.1, 50): None,
    Warmup(0.1, 10): 10,
    Warmup(0.1, 10, strategy="exponential"): 10,
    WSD(0.1, 100, 20): 100,
    WSD(0.1, 100, 20, warmup_steps=80, min_lr=0.01, decay="cosine"): 100,
    WSD(0.1, 100, 20, warmup_steps=10, decay="sqrt"): 100,
    OneCycle(0.1, 100): 100,
    OneCycle(0.1, 100, anneal_strategy="linear"): 100,
    OneCycle(0.1, 100, pct_start=0.0, anneal_strategy="linear", final_div_factor=1e30): 100,
    OneCycle(0.1, 1, pct_start=1.0): 1,
    Warmup(0.1, 10) >> Cosine(0.1, 90): 100,
    Sequential((Constant(0.1), 5), (Step(0.1, 10), 20), (Linear(0.01, 50), None)): None,
    Scaled(Cosine(0.1, 100), 0.5): 100,
    Scaled(Constant(0.1), 0.5): None,
    Scaled(Warmup(0.1, 10) >> MultiStep(0.1, (5, 20)), 2): None,
}
ALL = list(LENGTHS)
each_schedule = pytest.mark.parametrize("schedule", ALL, ids=repr)


def test_the_contract_runs_over_every_public_class():
    public = [getattr(schedules, name) for name in schedules.__all__]
    classes = {item for item in public if isinstance(item, type)}
    missing = classes - {Schedule} - {type(schedule) for schedule in ALL}
    names = ", ".join(sorted(each.__name__ for each in missing))
    assert not missing, f"add an instance and its length to LENGTHS in {__file__}: {names}"
    assert {type(schedule) for schedule in ALL} <= classes


# ------------------------------------------------------------------------------------------ the contract


@each_schedule
def test_the_same_step_gives_the_same_rate_whatever_was_asked_before(schedule):
    steps = range(20_001)
    forwards = [schedule.get_lr(step) for step in steps]
    shuffled = random.Random(0).sample(steps, len(steps))
    assert all(schedule.get_lr(step) == forwards[step] for step in shuffled)


@each_schedule
def test_a_rate_is_a_finite_float_that_is_not_negative(schedule):
    for step in (*range(20_001), 10**9):
        rate = schedule.get_lr(step)
        assert type(rate) is float
        assert 0 <= rate < math.inf


@each_schedule
def test_the_length_is_that_of_the_decay_or_of_the_warm_up(schedule):
    assert schedule.length == LENGTHS[schedule]


@each_schedule
def test_a_schedule_with_an_end_stays_at_its_last_rate(schedule):
    if schedule.length is not None:
        assert schedule.get_lr(schedule.length) == schedule.get_lr(schedule.length + 1) == schedule.get_lr(10**6)


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
def test_schedules_with_other_parameters_are_unequal(schedule):
    assert [other for other in ALL if other == schedule] == [schedule]


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


@each_schedule
def test_every_schedule_composes_on_both_sides(schedule):
    warmed = Warmup(0.1, 7) >> schedule
    assert [warmed.get_lr(7 + step) for step in range(300)] == [schedule.get_lr(step) for step in range(300)]
    assert schedule.after(Warmup(0.1, 7)) == warmed
    if schedule.length is None:
        with pytest.raises(ConfigurationError, match="needs the length in updates"):
            schedule >> Constant(0.5)
    else:
        then = schedule >> Constant(0.5)
        assert [then.get_lr(step) for step in range(schedule.length)] == [
            schedule.get_lr(step) for step in range(schedule.length)
        ]
        assert then.get_lr(schedule.length) == 0.5


def test_a_refused_state_names_both_sides_deep_inside_a_composed_schedule():
    here = Warmup(0.1, 10) >> Cosine(0.1, 90)
    saved = Warmup(0.1, 10) >> Cosine(0.1, 190)
    with pytest.raises(CheckpointError) as caught:
        here.load_state_dict(saved.state_dict())
    assert "parts[1].schedule.total_steps is 190 in the state and 90 here" in str(caught.value)
    assert "parts[1].length is 190 in the state and 90 here" in str(caught.value)
    assert "target_lr" not in str(caught.value)


def test_a_refused_state_names_both_sides_inside_a_scaled_schedule():
    with pytest.raises(CheckpointError) as caught:
        Scaled(MultiStep(0.1, (30, 60)), 0.5).load_state_dict(Scaled(MultiStep(0.1, (30, 70)), 0.25).state_dict())
    assert "schedule.milestones[1] is 70 in the state and 60 here" in str(caught.value)
    assert "factor is 0.25 in the state and 0.5 here" in str(caught.value)


def test_what_is_not_a_state_is_refused():
    with pytest.raises(CheckpointError, match="needs what state_dict"):
        Constant(0.1).load_state_dict(None)


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
    endless = r"Sequential\(parts\[0\]=\(Constant\(initial_lr=0.1\), None\)\): needs the length in updates"
    with pytest.raises(ConfigurationError, match=endless):
        Constant(0.1) >> Linear(0.1, 10)
    schedule = Sequential((Constant(0.1), 5), (Linear(0.1, 10), None))
    assert [schedule.get_lr(step) for step in (0, 4, 5, 15, 99)] == [0.1, 0.1, 0.1, 0.0, 0.0]
    assert schedule.length is None


class Halving:
    """A schedule written elsewhere: get_lr(step) = 2 ** -step."""

    def get_lr(self, step):
        return 0.5**step

    def state_dict(self):
        return {"type": "Halving"}

    def load_state_dict(self, state): ...


def test_a_schedule_written_elsewhere_composes():
    schedule = Warmup(1.0, 2) >> Scaled(Halving(), 3.0)
    assert [schedule.get_lr(step) for step in range(5)] == [0.0, 0.5, 3.0, 1.5, 0.75]
    schedule.load_state_dict(schedule.state_dict())
    assert schedule.state_dict()["parts"][1]["schedule"]["schedule"] == {"type": "Halving"}
    assert schedule.length is None


def test_composing_with_what_is_not_a_schedule_is_an_error():
    with pytest.raises(TypeError, match="unsupported operand"):
        Warmup(0.1, 10) >> 0.1
    with pytest.raises(ConfigurationError, match=r"Sequential\(\): needs at least 1 part"):
        Sequential()
    with pytest.raises(ConfigurationError, match=r"parts\[0\]=.*needs a pair \(schedule, length\)"):
        Sequential(Cosine(0.1, 10))
    with pytest.raises(ConfigurationError, match=r"Scaled\(schedule=0.1\): needs a schedule"):
        Scaled(0.1, 0.5)
