"""Advantages: GAE by a loop over time, GRPO's by a loop over groups, and TRL's own."""

import math

import numpy
import pytest
import torch

from pulsetrain.engine.arrays import namespace
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import gae, grpo_advantages
from tests.support import trl_trainers
from tests.support.formulas import arrays_of, assert_near, rounded, runs, value_and_gradients
from tests.support.losses import LIBRARIES, needs_jax

EVERY = ["torch", *LIBRARIES]


def gae_by_loop(rewards, values, dones, gamma, lam):
    """Backwards in time, one environment after another."""
    advantages = numpy.zeros(rewards.shape)
    for column in numpy.ndindex(*rewards.shape[1:]):
        following = 0.0
        for t in reversed(range(len(rewards))):
            at = (t, *column)
            if dones[at]:
                following = float(rewards[at]) - float(values[at])
            else:
                error = float(rewards[at]) + gamma * float(values[(t + 1, *column)]) - float(values[at])
                following = error + gamma * lam * following
            advantages[at] = following
    return advantages, advantages + values[:-1]


def grpo_by_loop(rewards, group_size, scale):
    def deviation(numbers):
        mean = sum(numbers) / len(numbers)
        return math.sqrt(sum((each - mean) ** 2 for each in numbers) / (len(numbers) - 1))

    numbers, found = [float(each) for each in rewards], []
    for start in range(0, len(numbers), group_size):
        group = numbers[start : start + group_size]
        mean = sum(group) / group_size
        by = {"group": deviation(group) + 1e-4, "batch": deviation(numbers) + 1e-4, "none": 1.0}[scale]
        found += [(each - mean) / by for each in group]
    return numpy.array(found)


def rollout_of(shape, seed, dtype="float64", often=0.2):
    generator = numpy.random.default_rng(seed)
    values = generator.standard_normal((shape[0] + 1, *shape[1:]))
    return [*rounded(dtype, generator.standard_normal(shape), values), generator.random(shape) < often]


# --------------------------------------------------------------------------------------------------------------- GAE


FACTORS = [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0, 0.5)]
SHAPES = [((1,), 0), ((2,), 1), ((7,), 2), ((16, 3), 3), ((33, 2, 2), 4)]


@pytest.mark.parametrize(
    ("library", "dtype", "factors", "shape", "seed"),
    runs(
        [(factors, *shape) for factors in FACTORS for shape in SHAPES],
        by_jax=[*((factors, (7,), 2) for factors in FACTORS), (FACTORS[0], (1,), 0), (FACTORS[0], (33, 2, 2), 4)],
    ),
)
def test_gae_is_the_sum_back_through_time(library, dtype, factors, shape, seed):
    gamma, lam = factors
    arrays = rollout_of(shape, seed, dtype)
    value, gradients = value_and_gradients(
        library, lambda *a: namespace(*a).stack(gae(*a, gamma, lam)), *arrays, wrt=(0, 1)
    )
    assert (value.shape, value.dtype) == ((2, *shape), dtype)
    assert_near(value, gae_by_loop(*arrays, gamma, lam))
    assert not any(gradient.any() for gradient in gradients), "constants for the losses that use them"


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize("often", [0.0, 0.01, 1.0])
def test_gae_of_long_rollouts_is_the_sum_back_through_time(library, often):
    arrays = rollout_of((1000, 2), 0, "float32", often)
    estimate = gae
    if library == "jax":  # one at a time, its operations are compiled for ten lengths each
        import jax

        estimate = jax.jit(gae)
    for found, expected in zip(estimate(*arrays_of(library, *arrays)), gae_by_loop(*arrays, 0.99, 0.95), strict=True):
        assert_near(found, expected)


@pytest.mark.parametrize("library", EVERY)
def test_an_end_after_the_last_step_needs_no_value_of_what_follows(library):
    rewards, values, dones = rollout_of((5,), 0)
    dones[:] = [False, True, False, False, True]
    expected = gae_by_loop(rewards, values, dones, 0.99, 0.95)
    for last in (math.nan, math.inf, 1e6):
        values[5] = last
        for found, its in zip(gae(*arrays_of(library, rewards, values, dones)), expected, strict=True):
            assert_near(found, its)


@pytest.mark.parametrize("library", EVERY)
def test_nothing_crosses_an_episode_end_not_even_nan(library):
    rewards, values, dones = rollout_of((6,), 0)
    dones[:] = [False, False, True, False, False, False]
    expected, _ = gae_by_loop(rewards, values, dones, 0.99, 0.95)
    rewards[3:], values[3:] = math.nan, math.inf
    found, _ = gae(*arrays_of(library, rewards, values, dones))
    assert_near(found[:3], expected[:3])
    assert numpy.isnan(numpy.asarray(found[3:])).all()


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_ends_may_be_numbers(library, dtype):
    rewards, values, dones = rollout_of((9, 2), 0)
    as_numbers = gae(*arrays_of(library, rewards, values, dones.astype(dtype)))
    for found, expected in zip(as_numbers, gae(*arrays_of(library, rewards, values, dones)), strict=True):
        assert_near(found, expected, 0.0)


@pytest.mark.parametrize("library", EVERY)
def test_half_precision_and_whole_rewards_are_computed_in_float32(library):
    rewards = numpy.array([0, 0, 1, 0, 1])
    values, dones = numpy.arange(6).astype("float16") / 8, numpy.array([False, False, True, False, False])
    for given in (rewards.astype("float16"), rewards.astype("int32"), rewards.astype(bool)):
        found = gae(*arrays_of(library, given, values, dones))[0]
        assert numpy.asarray(found).dtype in (numpy.float32, numpy.float64)
        assert_near(found, gae_by_loop(rewards, values, dones, 0.99, 0.95)[0])


@pytest.mark.parametrize("library", EVERY)
def test_an_empty_rollout_has_no_advantages(library):
    for found in gae(*arrays_of(library, numpy.zeros((0, 2)), numpy.zeros((1, 2)), numpy.zeros((0, 2), bool))):
        assert tuple(found.shape) == (0, 2)


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize(("rewards", "values"), [((4,), (4,)), ((4, 2), (5,)), ((4, 2), (5, 3)), ((), ())])
def test_values_that_do_not_fit_are_refused(library, rewards, values):
    arrays = arrays_of(library, numpy.zeros(rewards), numpy.zeros(values), numpy.zeros(rewards, bool))
    with pytest.raises(
        ValueError, match=r"gae\(rewards of .*: needs rewards \(time, ...\) and values \(time \+ 1, ...\)"
    ):
        gae(*arrays)


def test_ends_and_options_that_do_not_fit_are_refused():
    rewards, values = torch.zeros(4), torch.zeros(5)
    with pytest.raises(ValueError, match=r"gae\(rewards of shape \(4,\), dones of shape \(5,\)\): needs equal shapes"):
        gae(rewards, values, torch.zeros(5))
    for argument in ("gamma", "lam"):
        for value in (-0.1, 1.1, math.nan, "a"):
            with pytest.raises(ConfigurationError, match=rf"gae\({argument}={value!r}\): needs a number from 0 to 1"):
                gae(rewards, values, torch.zeros(4), **{argument: value})


# -------------------------------------------------------------------------------------------------------------- GRPO


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(("prompts", "group_size", "seed"), [(1, 2, 0), (3, 4, 1), (5, 8, 2), (2, 3, 3)])
def test_advantages_of_groups_match_the_formula(library, dtype, scale, prompts, group_size, seed):
    (rewards,) = rounded(dtype, numpy.random.default_rng(seed).standard_normal(prompts * group_size))
    found = grpo_advantages(*arrays_of(library, rewards), group_size, scale)
    assert tuple(found.shape) == rewards.shape
    assert_near(found, grpo_by_loop(rewards, group_size, scale))


@needs_jax
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_inside_jit_they_are_the_same_and_have_no_gradient(scale):
    rewards = numpy.random.default_rng(0).standard_normal(12).astype("float32")
    value, (gradient,) = value_and_gradients("jax", lambda r: grpo_advantages(r, 4, scale), rewards)
    assert_near(value, grpo_by_loop(rewards, 4, scale))
    assert not gradient.any()


@pytest.mark.parametrize("library", EVERY)
def test_a_group_of_equal_rewards_has_zero_advantages(library):
    rewards = numpy.array([1, 1, 1, 0, 1, 0])
    (given,) = arrays_of(library, rewards)
    for scale in ("group", "batch", "none"):
        found = grpo_advantages(given, 3, scale)
        assert found.tolist()[:3] == [0.0, 0.0, 0.0]
        assert_near(found, grpo_by_loop(rewards, 3, scale))


@pytest.mark.parametrize("group_size", [1, 0, -2, 2.0, True, "a", None])
def test_an_invalid_group_size_is_refused(group_size):
    with pytest.raises(
        ConfigurationError, match=r"grpo_advantages\(group_size=.*\): needs a whole number of replies to"
    ):
        grpo_advantages(torch.zeros(4), group_size)


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize("shape", [(5,), (2, 2), ()])
def test_rewards_that_do_not_fill_whole_groups_are_refused(library, shape):
    with pytest.raises(ValueError, match=r"grpo_advantages\(rewards of shape .*, group_size=2\): needs one reward for"):
        grpo_advantages(*arrays_of(library, numpy.zeros(shape)), 2)


def test_an_unknown_scale_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"scale='groups'\): unknown; choose one of batch, group, none; did you"
    ):
        grpo_advantages(torch.zeros(4), 2, "groups")


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("seed", [0, 1])
def test_advantages_of_groups_are_trls(scale, seed):
    pytest.importorskip("trl", reason="trl is not there: pip install trl")
    rewards = torch.randn(12, dtype=torch.float32, generator=torch.Generator().manual_seed(seed))
    assert_near(grpo_advantages(rewards, 4, scale), trl_trainers.grpo_advantages(rewards, 4, scale))
