"""Each schedule against torch's scheduler and transformers', over 10,000 steps to within 1e-12.

Torch's schedulers are stepped as a user steps them, also those that compute each rate from the one before.

The convention: their rate after n calls of step() is ours at n, the number of updates already made.
"""

from __future__ import annotations

import math

import pytest
import transformers
from torch.optim import lr_scheduler

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
    Step,
    Warmup,
)
from tests.support.schedulers import rates_of

STEPS = 10_000


def ids(value):
    return repr(value) if isinstance(value, Schedule) else ""


def assert_equal_rates(schedule, theirs):
    ours = [schedule.get_lr(step) for step in range(len(theirs))]
    assert max(abs(mine - other) for mine, other in zip(ours, theirs, strict=True)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "make_scheduler"),
    [
        (Constant(0.1), lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        (Step(0.1, 300, 0.7), lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=300, gamma=0.7)),
        (
            MultiStep(0.1, (1, 50, 3000, 9999), 0.3),
            lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 50, 3000, 9999], gamma=0.3),
        ),
        (Exponential(0.1, 0.999), lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.999)),
        # LinearLR speaks of factors of the initial rate, and stays at the last one as ours does
        (Linear(0.1, 6000, 0.01), lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6000)),
        (Polynomial(0.1, 8000, 2.0), lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 8000, 2.0)),
        (Polynomial(0.1, 8000, 0.5), lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 8000, 0.5)),
        # CosineAnnealingLR climbs again after T_max, where ours stays at min_lr: compared up to there
        (
            Cosine(0.1, STEPS, min_lr=0.001),
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=0.001),
        ),
        (CosineRestarts(0.1, 370), lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 370)),
        (
            CosineRestarts(0.1, 10, 3, 0.001),
            lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10, T_mult=3, eta_min=0.001),
        ),
        (OneCycle(0.1, STEPS), lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)),
        (
            OneCycle(0.1, STEPS, 0.17, "linear", 10.0, 1e3),
            lambda optimizer: lr_scheduler.OneCycleLR(
                optimizer, 0.1, STEPS, None, None, 0.17, "linear", div_factor=10.0, final_div_factor=1e3
            ),
        ),
        # torch raises past total_steps, where ours stays at the last rate
        (OneCycle(0.1, STEPS, 0.0), lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS, pct_start=0.0)),
        (
            OneCycle(0.1, STEPS, 0.00005),
            lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS, pct_start=5e-5),
        ),
        # torch has neither a scheduler for these nor a start at 0: its LambdaLR, with the formula
        (
            InverseSqrt(0.1, 400),
            lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: math.sqrt(400 / (step + 400))),
        ),
        (Warmup(0.1, 500), lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 500, 1.0))),
        (
            Warmup(0.1, 500, "exponential"),
            lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 500, 1.0) ** 2),
        ),
        (
            Scaled(Step(0.1, 300, 0.7), 0.25),
            lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.25 * 0.7 ** (step // 300)),
        ),
        (
            WSD(0.1, 9000, 1000, 500, min_lr=0.01),
            lambda optimizer: lr_scheduler.LambdaLR(
                optimizer,
                lambda step: 0.1 + 0.9 * min(step / 500, 1.0) * min(max((9000 - step) / 1000, 0.0), 1.0),
            ),
        ),
    ],
    ids=ids,
)
def test_ten_thousand_rates_agree_with_torch(schedule, make_scheduler):
    assert_equal_rates(schedule, rates_of(make_scheduler, 0.1, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "make_scheduler"),
    [
        (
            Warmup(0.1, 500) >> Constant(0.1),
            lambda optimizer: transformers.get_constant_schedule_with_warmup(optimizer, 500),
        ),
        (
            Warmup(0.1, 500) >> Linear(0.1, 8500),
            lambda optimizer: transformers.get_linear_schedule_with_warmup(optimizer, 500, 9000),
        ),
        # theirs climbs again after the end, where ours stays: the run is as long as the comparison
        (
            Warmup(0.1, 500) >> Cosine(0.1, 9500),
            lambda optimizer: transformers.get_cosine_schedule_with_warmup(optimizer, 500, STEPS),
        ),
        (
            Warmup(0.1, 500) >> Cosine(0.1, 9500, min_lr=0.02),
            lambda optimizer: transformers.get_cosine_with_min_lr_schedule_with_warmup(
                optimizer, 500, STEPS, min_lr_rate=0.2
            ),
        ),
        (
            Warmup(0.1, 500) >> CosineRestarts(0.1, 1900),
            lambda optimizer: transformers.get_cosine_with_hard_restarts_schedule_with_warmup(
                optimizer, 500, STEPS, num_cycles=5
            ),
        ),
        (
            Warmup(0.1, 500) >> Polynomial(0.1, 8500, power=2.0, min_lr=1e-4),
            lambda optimizer: transformers.get_polynomial_decay_schedule_with_warmup(
                optimizer, 500, 9000, lr_end=1e-4, power=2.0
            ),
        ),
        (
            Warmup(0.1, 500) >> InverseSqrt(0.1, 2000),
            lambda optimizer: transformers.get_inverse_sqrt_schedule(optimizer, 500, timescale=2000),
        ),
        (
            Warmup(0.1, 500) >> InverseSqrt(0.1, 500),
            lambda optimizer: transformers.get_inverse_sqrt_schedule(optimizer, 500),
        ),
        *(
            (
                WSD(0.1, 9000, 1000, warmup, floor * 0.1, ours),
                lambda optimizer, warmup=warmup, floor=floor, theirs=theirs: transformers.get_wsd_schedule(
                    optimizer, warmup, 1000, 9000, decay_type=theirs, min_lr_ratio=floor
                ),
            )
            for warmup, floor in ((500, 0.0), (500, 0.1), (0, 0.1))
            for ours, theirs in (("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt"))
        ),
    ],
    ids=ids,
)
def test_ten_thousand_rates_agree_with_transformers(schedule, make_scheduler):
    assert_equal_rates(schedule, rates_of(make_scheduler, 0.1, STEPS))
