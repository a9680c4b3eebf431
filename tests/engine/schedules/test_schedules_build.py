"""build_schedule: schedules by name, fitted to the length of a run."""

from __future__ import annotations

import inspect
import math
from dataclasses import MISSING, fields

import pytest

from pulsetrain.engine.errors import ConfigurationError
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
    Step,
    Warmup,
    build_schedule,
)
from pulsetrain.engine.schedules.named import _NAMED, _NEEDED, NAMES, keywords_of
from tests.support.schedulers import NEEDED

WITH_A_FLOOR = [name for name in NAMES if "min_lr" in keywords_of("test", name)]


@pytest.mark.parametrize("name", NAMES)
def test_a_named_schedule_can_be_given_each_of_its_parameters(name: str):
    arguments = set(inspect.signature(build_schedule).parameters) - {"total_steps", "warmup_steps", "kwargs"}
    taken = arguments & {field.name for field in fields(_NAMED[name])}
    assert not taken, f"rename {taken} in {_NAMED[name].__name__}: build_schedule has an argument with that name"
    needed = {field.name for field in fields(_NAMED[name])[1:] if field.default is MISSING}
    needed &= set(keywords_of("test", name)) - {"first_cycle", "decay_steps", "timescale"}  # which follow from the run
    values, described = set(NEEDED.get(name, {})), set(_NEEDED)
    assert needed == values, f"add {needed - values} of {name!r} to NEEDED in tests/support/schedulers.py"
    assert needed <= described, f"add {needed - described} to _NEEDED in engine/schedules/named.py"


def test_decay_spans_what_the_warm_up_leaves():
    assert build_schedule("cosine", 0.1, total_steps=100, warmup_steps=10) == Warmup(0.1, 10) >> Cosine(
        0.1, 90, min_lr=0.1 * 0.1
    )
    schedule = build_schedule("linear", 1.0, total_steps=100, warmup_steps=20, min_lr_ratio=0.5)
    assert [schedule.get_lr(step) for step in (0, 10, 20, 60, 100)] == [0.0, 0.5, 1.0, 0.75, 0.5]


@pytest.mark.parametrize(
    ("name", "arguments", "built"),
    [
        ("constant", {"total_steps": None}, Constant(1.0)),
        ("linear", {}, Linear(1.0, 50)),
        ("linear", {"min_lr": 0.25}, Linear(1.0, 50, 0.25)),
        ("polynomial", {}, Polynomial(1.0, 50, 1.0, 0.1)),
        ("polynomial", {"power": 2, "min_lr": 0}, Polynomial(1.0, 50, 2.0, 0.0)),
        ("cosine", {}, Cosine(1.0, 50, 0.1)),
        ("cosine", {"min_lr_ratio": 0.0}, Cosine(1.0, 50)),
        ("cosine_with_restarts", {}, CosineRestarts(1.0, 25, min_lr=0.1)),
        ("cosine_with_restarts", {"total_steps": 1}, CosineRestarts(1.0, 1, min_lr=0.1)),
        (
            "cosine_with_restarts",
            {"warmup_steps": 11},
            Warmup(1.0, 11) >> CosineRestarts(1.0, 20, min_lr=0.1),
        ),
        (
            "cosine_with_restarts",
            {"total_steps": None, "first_cycle": 5, "multiplier": 2},
            CosineRestarts(1.0, 5, 2, min_lr=0.1),
        ),
        ("step", {"total_steps": None, "step_size": 3, "gamma": 0.5}, Step(1.0, 3, 0.5)),
        ("multi_step", {"total_steps": None, "milestones": [3, 6]}, MultiStep(1.0, (3, 6), 0.1)),
        ("multi_step", {"warmup_steps": 2, "milestones": [3, 6]}, Warmup(1.0, 2) >> MultiStep(1.0, (1, 4), 0.1)),
        ("exponential", {"total_steps": None, "gamma": 0.9}, Exponential(1.0, 0.9)),
        ("inverse_sqrt", {"total_steps": None}, InverseSqrt(1.0, 10_000)),
        ("inverse_sqrt", {"warmup_steps": 20}, Warmup(1.0, 20) >> InverseSqrt(1.0, 20)),
        ("inverse_sqrt", {"warmup_steps": 20, "timescale": 7}, Warmup(1.0, 20) >> InverseSqrt(1.0, 7)),
        ("wsd", {}, WSD(1.0, 50, 5, min_lr=0.1)),
        ("wsd", {"warmup_steps": 10}, Warmup(1.0, 10) >> WSD(1.0, 40, 5, min_lr=0.1)),
        ("wsd", {"total_steps": 9}, WSD(1.0, 9, 1, min_lr=0.1)),
        ("wsd", {"warmup_steps": 48}, Warmup(1.0, 48) >> WSD(1.0, 2, 2, min_lr=0.1)),  # at most the remainder
        ("wsd", {"decay_steps": 20, "decay": "sqrt", "min_lr_ratio": 0}, WSD(1.0, 50, 20, decay="sqrt")),
        ("one_cycle", {}, OneCycle(1.0, 50)),
        ("one_cycle", {"pct_start": 0.1, "final_div_factor": 10}, OneCycle(1.0, 50, 0.1, final_div_factor=10.0)),
        (
            "constant",
            {"warmup_steps": 4, "warmup_strategy": "exponential"},
            Warmup(1.0, 4, "exponential") >> Constant(1.0),
        ),
    ],
)
def test_each_name_builds_its_schedule(name, arguments, built):
    assert build_schedule(name, 1.0, **{"total_steps": 50, **arguments}) == built


@pytest.mark.parametrize("name", NAMES)
def test_the_highest_rate_is_the_learning_rate(name):
    schedule = build_schedule(name, 0.1, total_steps=1000, **NEEDED.get(name, {}))
    assert max(schedule.get_lr(step) for step in range(1000)) == pytest.approx(0.1, rel=1e-12)


def test_milestones_are_numbers_of_updates_of_the_run_whatever_the_warm_up():
    schedule = build_schedule("multi_step", 1.0, total_steps=9000, warmup_steps=500, milestones=[3000, 6000], gamma=0.5)
    assert [schedule.get_lr(step) for step in (500, 2999, 3000, 5999, 6000)] == [1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("name", sorted({*NAMES} - {"one_cycle"}))
def test_the_first_update_after_the_warm_up_runs_at_the_learning_rate(name):
    needed = {"milestones": (300, 600)} if name == "multi_step" else NEEDED.get(name, {})
    schedule = build_schedule(name, 0.1, total_steps=1000, warmup_steps=100, **needed)
    assert schedule.get_lr(100) == 0.1
    assert all(schedule.get_lr(step) < schedule.get_lr(step + 1) for step in range(100))


@pytest.mark.parametrize("name", WITH_A_FLOOR)
def test_a_floor_is_a_part_of_the_learning_rate_or_a_rate(name):
    def lowest(**floor):
        schedule = build_schedule(name, 0.1, total_steps=1000, **floor)
        return min(schedule.get_lr(step) for step in range(1001))

    near = 5e-6  # a restart comes before its cycle has quite reached the floor
    assert lowest(min_lr_ratio=0.25) == pytest.approx(0.025, abs=near)
    assert lowest(min_lr=0.003) == pytest.approx(0.003, abs=near)
    assert lowest() == pytest.approx(0.0 if name == "linear" else 0.01, abs=near)


@pytest.mark.parametrize("name", sorted({*NAMES} - {*WITH_A_FLOOR}))
def test_a_floor_is_refused_where_the_schedule_has_none(name):
    with pytest.raises(ConfigurationError, match=rf"build_schedule\(min_lr_ratio=0.1\): the schedule '{name}' has no"):
        build_schedule(name, 0.1, total_steps=1000, min_lr_ratio=0.1, **NEEDED.get(name, {}))
    with pytest.raises(ConfigurationError, match=rf"build_schedule\(min_lr=0.1\): unknown to the schedule '{name}'"):
        build_schedule(name, 0.1, total_steps=1000, min_lr=0.1, **NEEDED.get(name, {}))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cosin", {}, r"build_schedule\(name='cosin'\): unknown; choose one of constant, .*did you mean 'cosine'\?"),
        (None, {}, r"build_schedule\(name=None\): unknown; choose one of"),
        (
            "cosine",
            {"total_steps": None},
            r"build_schedule\(name='cosine'\): needs the number of updates \(total_steps=None\); bound the run",
        ),
        ("linear", {"total_steps": None}, r"build_schedule\(name='linear'\): .*total_steps=None"),
        ("wsd", {"total_steps": None}, r"build_schedule\(name='wsd'\): .*total_steps=None"),
        (
            "cosine_with_restarts",
            {"total_steps": None},
            r"build_schedule\(name='cosine_with_restarts'\): .*total_steps=None",
        ),
        ("cosine", {"total_steps": 10.5}, r"build_schedule\(total_steps=10.5\): needs a whole number of updates"),
        ("cosine", {"warmup_steps": 100}, r"build_schedule\(warmup_steps=100\): leaves nothing of total_steps=100"),
        ("constant", {"warmup_steps": 101}, r"build_schedule\(warmup_steps=101\): leaves nothing"),
        ("wsd", {"warmup_steps": 100}, r"build_schedule\(warmup_steps=100\): leaves nothing"),
        (
            "wsd",
            {"warmup_steps": 50, "decay_steps": 51},
            r"build_schedule\(decay_steps=51\): is more than the 50 updates that warmup_steps=50 leaves",
        ),
        (
            "one_cycle",
            {"warmup_steps": 10},
            r"build_schedule\(warmup_steps=10\): 'one_cycle' includes .*pass .*pct_start",
        ),
        ("one_cycle", {"min_lr_ratio": 0.1}, r"build_schedule\(min_lr_ratio=0.1\).*pass final_div_factor"),
        ("cosine", {"warmup_steps": -1}, r"build_schedule\(warmup_steps=-1\): needs a whole number"),
        ("cosine", {"warmup_strategy": "cubic"}, r"build_schedule\(warmup_strategy='cubic'\): unknown; choose one of"),
        ("cosine", {"min_lr_ratio": 1.5}, r"build_schedule\(min_lr_ratio=1.5\): needs a fraction of learning_rate"),
        ("cosine", {"min_lr_ratio": 0.1, "min_lr": 0}, r"\(min_lr_ratio=0.1\): min_lr=0 sets .* too; pass one"),
        ("cosine", {"gamma": 0.5}, r"build_schedule\(gamma=0.5\): unknown to the schedule 'cosine'; it takes min_lr"),
        ("step", {}, r"build_schedule\(name='step'\): needs step_size, the updates between two drops"),
        ("multi_step", {}, r"build_schedule\(name='multi_step'\): needs milestones, the numbers of updates"),
        (
            "multi_step",
            {"milestones": [10, 60], "warmup_steps": 10},
            r"build_schedule\(milestones=\[10, 60\]\): counts from the start .*, and is not after warmup_steps=10",
        ),
        ("exponential", {}, r"build_schedule\(name='exponential'\): needs gamma, the factor"),
        ("inverse_sqrt", {"timescale": 0}, r"InverseSqrt\(timescale=0\): needs at least 1"),
        ("cosine", {"total_steps": 0}, r"build_schedule\(warmup_steps=0\): leaves nothing of total_steps=0"),
    ],
)
def test_a_bad_request_is_refused_by_argument_and_value(name, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        build_schedule(name, 0.1, **{"total_steps": 100, **arguments})


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan, "0.1", None])
def test_a_learning_rate_that_is_not_a_positive_number_is_refused(rate):
    with pytest.raises(ConfigurationError, match=r"build_schedule\(learning_rate="):
        build_schedule("cosine", rate, total_steps=10)


@pytest.mark.parametrize("total_steps", [5, 7, 51, 999])
def test_the_last_update_of_an_odd_run_with_restarts_is_not_a_restart(total_steps):
    schedule = build_schedule("cosine_with_restarts", 1.0, total_steps=total_steps)
    restarts = [step for step in range(total_steps) if schedule.get_lr(step) == 1.0]
    assert restarts == [0, total_steps // 2 + 1]
