"""The formulas of the schedules by hand, and the parameters that they refuse."""

from __future__ import annotations

import math
from dataclasses import replace

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
    Scaled,
    Sequential,
    Step,
    Warmup,
)


def rates(schedule, steps):
    return [schedule.get_lr(step) for step in steps]


def test_constant_stays():
    assert rates(Constant(0.3), (0, 7, 10**6)) == [0.3, 0.3, 0.3]


def test_linear_falls_by_equal_parts_and_stays_at_the_minimum():
    assert rates(Linear(1.0, 4), range(6)) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert rates(Linear(1.0, 4, min_lr=0.5), (0, 2, 4, 9)) == [1.0, 0.75, 0.5, 0.5]


def test_polynomial_falls_with_the_power_of_what_is_left():
    assert rates(Polynomial(1.0, 4, power=2.0), range(6)) == [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    assert rates(Polynomial(1.0, 4, power=2.0, min_lr=0.5), (0, 2, 4, 9)) == [1.0, 0.625, 0.5, 0.5]


def test_polynomial_is_linear_by_default():
    assert rates(Polynomial(0.3, 7), range(9)) == rates(Linear(0.3, 7), range(9))


def test_step_drops_after_each_step_size_updates():
    assert rates(Step(1.0, step_size=3, gamma=0.5), range(7)) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]


def test_multi_step_drops_at_each_milestone():
    assert rates(MultiStep(1.0, (1, 4), gamma=0.5), range(6)) == [1.0, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_multi_step_takes_a_list_as_configuration_files_give_it():
    assert MultiStep(0.1, [3, 6]) == MultiStep(0.1, (3, 6))
    assert hash(MultiStep(0.1, [3, 6])) == hash(MultiStep(0.1, (3, 6)))


def test_exponential_multiplies_at_each_update():
    assert rates(Exponential(1.0, 0.5), range(4)) == [1.0, 0.5, 0.25, 0.125]
    assert rates(Exponential(1.0, 2.0), range(4)) == [1.0, 2.0, 4.0, 8.0]


def test_cosine_passes_the_middle_half_way_and_stays_at_the_minimum():
    schedule = Cosine(1.0, total_steps=4, min_lr=0.2)
    assert schedule.get_lr(0) == 1.0
    assert schedule.get_lr(1) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, abs=1e-15)
    assert schedule.get_lr(2) == pytest.approx(0.6, abs=1e-15)
    assert rates(schedule, (4, 5, 8)) == [0.2, 0.2, 0.2]


def test_cosine_restarts_begins_each_cycle_at_the_top():
    assert rates(CosineRestarts(1.0, first_cycle=2), range(5)) == pytest.approx([1.0, 0.5, 1.0, 0.5, 1.0])
    longer = CosineRestarts(1.0, first_cycle=2, multiplier=3)  # cycles of 2, 6, 18, 54 updates
    assert [step for step in range(80) if longer.get_lr(step) == 1.0] == [0, 2, 8, 26]
    assert longer.get_lr(2 + 3) == pytest.approx(0.5)


def test_cosine_restarts_finds_the_first_update_of_far_cycles_exactly():
    schedule = CosineRestarts(1.0, first_cycle=1, multiplier=10)
    start = sum(10**cycle for cycle in range(15))
    assert schedule.get_lr(start) == 1.0
    assert schedule.get_lr(start - 1) < 1e-12


def test_inverse_sqrt_halves_after_three_timescales():
    assert rates(InverseSqrt(1.0, timescale=4), (0, 12, 60)) == [1.0, 0.5, 0.25]


def test_inverse_sqrt_after_its_warm_up_is_the_schedule_of_the_transformer_paper():
    # Vaswani et al. 2017, eq. 3: width ** -0.5 * min(step ** -0.5, step * warmup ** -1.5)
    width, warmup = 512, 4000
    peak = width**-0.5 * warmup**-0.5
    schedule = Warmup(peak, warmup) >> InverseSqrt(peak, warmup)
    for step in (1, 100, 3999, 4000, 4001, 100_000):
        assert schedule.get_lr(step) == pytest.approx(width**-0.5 * min(step**-0.5, step * warmup**-1.5), rel=1e-12)


def test_linear_warmup_reaches_the_target_after_warmup_steps():
    warmup = Warmup(target_lr=1.0, warmup_steps=4)
    assert rates(warmup, (0, 1, 2, 3, 4, 9)) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_exponential_warmup_grows_with_the_square_of_the_steps():
    warmup = Warmup(target_lr=1.0, warmup_steps=4, strategy="exponential")
    assert rates(warmup, (0, 1, 2, 3, 4, 9)) == [0.0, 0.0625, 0.25, 0.5625, 1.0, 1.0]


def test_wsd_rises_stays_and_falls_over_the_last_updates():
    schedule = WSD(1.0, total_steps=10, decay_steps=4, warmup_steps=2)
    assert rates(schedule, range(12)) == [0, 0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]


def test_wsd_rises_from_the_minimum_and_falls_to_it():
    schedule = WSD(1.0, total_steps=10, decay_steps=4, warmup_steps=2, min_lr=0.5)
    assert rates(schedule, (0, 1, 2, 6, 8, 10, 99)) == [0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.5]


def test_wsd_decays_by_a_line_half_a_cosine_or_a_root():
    a_quarter_in = {
        decay: WSD(1.0, total_steps=10, decay_steps=4, decay=decay).get_lr(7) for decay in ("linear", "cosine", "sqrt")
    }
    assert a_quarter_in == {"linear": 0.75, "cosine": pytest.approx((1 + math.sqrt(0.5)) / 2), "sqrt": 0.5}


def test_wsd_may_be_warm_up_and_decay_alone():
    assert rates(WSD(1.0, total_steps=4, decay_steps=2, warmup_steps=2), range(5)) == [0, 0.5, 1, 0.5, 0]


def test_one_cycle_peaks_at_its_part_of_the_run_and_ends_with_the_last_update():
    schedule = OneCycle(1.0, 11, pct_start=5 / 11, anneal_strategy="linear", div_factor=2.0, final_div_factor=4.0)
    # up from 1/2 over steps 0 to 4, down to 1/8 over steps 4 to 10
    assert rates(schedule, range(5)) == [0.5, 0.625, 0.75, 0.875, 1.0]
    assert rates(schedule, (7, 10, 11, 99)) == [0.5625, 0.125, 0.125, 0.125]


def test_one_cycle_follows_half_a_cosine_on_both_sides():
    schedule = OneCycle(1.0, 11, pct_start=5 / 11, div_factor=2.0, final_div_factor=4.0)
    assert rates(schedule, (0, 2, 4, 7, 10)) == pytest.approx([0.5, 0.75, 1.0, 0.5625, 0.125], abs=1e-15)


def test_one_cycle_whose_rise_ends_with_the_first_update_starts_at_the_top():
    schedule = OneCycle(1.0, 4, pct_start=0.25, anneal_strategy="linear", div_factor=1.0, final_div_factor=4.0)
    assert rates(schedule, range(5)) == [1.0, 0.75, 0.5, 0.25, 0.25]


def test_one_cycle_that_only_rises_stays_at_the_top():
    assert rates(OneCycle(1.0, 3, 1.0, "linear", div_factor=2.0), range(5)) == [0.5, 0.75, 1.0, 1.0, 1.0]


def test_scaled_multiplies_each_rate():
    assert rates(Scaled(Linear(1.0, 4), 0.5), range(6)) == [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    assert rates(Scaled(Linear(1.0, 4), 0), range(6)) == [0.0] * 6


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
        (lambda: MultiStep(0.1, ()), r"MultiStep\(milestones=\(\)\): needs a tuple of updates"),
        (lambda: MultiStep(0.1, 30), r"MultiStep\(milestones=30\): needs a tuple of updates"),
        (lambda: MultiStep(0.1, (0, 3)), r"MultiStep\(milestones=\(0, 3\)\): needs whole numbers, each at least 1"),
        (lambda: MultiStep(0.1, (1.5,)), r"MultiStep\(milestones=\(1.5,\)\): needs whole numbers"),
        (lambda: MultiStep(0.1, (6, 3)), r"MultiStep\(milestones=\(6, 3\)\): needs ascending milestones"),
        (lambda: MultiStep(0.1, (3, 3)), r"MultiStep\(milestones=\(3, 3\)\): needs ascending milestones"),
        (lambda: MultiStep(0.1, (3,), -1), r"MultiStep\(gamma=-1\): needs a finite number that is not negative"),
        (lambda: Exponential(0.1, -0.5), r"Exponential\(gamma=-0.5\): needs a finite number that is not negative"),
        (lambda: Exponential(0.1, None), r"Exponential\(gamma=None\): needs a finite number"),
        (lambda: Polynomial(0.1, 10, power=0), r"Polynomial\(power=0.0\): never falls; pass a positive power"),
        (lambda: Polynomial(0.1, 10, power=-1), r"Polynomial\(power=-1\): needs a finite number that is not neg"),
        (lambda: Polynomial(0.1, 10, min_lr=0.2), r"Polynomial\(min_lr=0.2\): is above initial_lr=0.1"),
        (lambda: CosineRestarts(0.1, 0), r"CosineRestarts\(first_cycle=0\): needs at least 1"),
        (lambda: CosineRestarts(0.1, 1, 0), r"CosineRestarts\(multiplier=0\): needs at least 1"),
        (lambda: CosineRestarts(0.1, 1, 1.5), r"CosineRestarts\(multiplier=1.5\): needs a whole number"),
        (lambda: InverseSqrt(0.1, 0), r"InverseSqrt\(timescale=0\): needs at least 1 optimizer update"),
        (lambda: Warmup(0.1, 0), r"Warmup\(warmup_steps=0\): needs at least 1"),
        (lambda: Warmup(0.1, 5, "linaer"), r"Warmup\(strategy='linaer'\): unknown; .*did you mean 'linear'\?"),
        (lambda: WSD(0.1, 100, 0), r"WSD\(decay_steps=0\): needs at least 1 optimizer update"),
        (lambda: WSD(0.1, 100, 10, -1), r"WSD\(warmup_steps=-1\): needs at least 0"),
        (
            lambda: WSD(0.1, 100, 81, 20),
            r"WSD\(decay_steps=81\): is more than warmup_steps=20 leaves of total_steps=100; shorten",
        ),
        (lambda: WSD(0.1, 100, 10, min_lr=1), r"WSD\(min_lr=1.0\): is above initial_lr=0.1"),
        (lambda: WSD(0.1, 100, 10, decay="1-sqrt"), r"WSD\(decay='1-sqrt'\): unknown; choose one of cosine, linear, "),
        (lambda: OneCycle(0.1, 0), r"OneCycle\(total_steps=0\): needs at least 1 optimizer update"),
        (lambda: OneCycle(0.1, 10, 1.1), r"OneCycle\(pct_start=1.1\): needs a share of the run, from 0 to 1"),
        (lambda: OneCycle(0.1, 10, 0.3, "cosine"), r"OneCycle\(anneal_strategy='cosine'\): .*did you mean 'cos'\?"),
        (
            lambda: OneCycle(0.1, 10, div_factor=0),
            r"OneCycle\(div_factor=0.0\): divides max_lr, so the start is above",
        ),
        (lambda: OneCycle(0.1, 10, final_div_factor=0.01), r"OneCycle\(final_div_factor=0.01\): ends above .*0.04"),
        (lambda: Scaled(Constant(0.1), -1), r"Scaled\(factor=-1\): needs a finite number that is not negative"),
        (lambda: Sequential((Cosine(0.1, 5), 0)), r"parts\[0\]=.*needs the length in updates, at least 1"),
    ],
)
def test_a_bad_parameter_is_refused_at_construction_by_place_argument_and_value(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    ("schedule", "last_finite"),
    [
        (Exponential(1.0, 2.0), 1023),
        (Exponential(2.0, 2.0), 1022),  # the product, not the power
        (Step(1.0, 10, 2.0), 10239),
        (MultiStep(1.0, (1, 2, 3), 1e150), 2),
    ],
)
def test_growth_beyond_the_range_of_floats_is_infinite(schedule, last_finite):
    assert schedule.get_lr(last_finite) < math.inf
    assert [schedule.get_lr(step) for step in (last_finite + 1, 10**9)] == [math.inf, math.inf]
    assert replace(schedule, initial_lr=0.0).get_lr(10**9) == 0.0
