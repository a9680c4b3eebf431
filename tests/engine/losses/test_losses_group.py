"""GRPO's family: ratios of replies, CISPO, RLOO's and GDPO's advantages, beside formulas by loops and TRL."""

import math

import numpy
import pytest
import torch

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import (
    clip_fraction,
    gdpo_advantages,
    grpo_advantages,
    grpo_loss,
    mean_over_replies,
    ppo_policy_loss,
    rloo_advantages,
)
from tests.support import trl_trainers
from tests.support.formulas import RUNS, arrays_of, assert_near, differences, rounded, runs, value_and_gradients
from tests.support.losses import LIBRARIES, needs_jax

EVERY = ["torch", *LIBRARIES]


def replies_of(shape, seed, dtype="float64"):
    """Log-probabilities now, then, and of a reference; advantages; and a mask."""
    generator = numpy.random.default_rng(seed)
    log_probs = -2 * generator.random(shape)
    old = log_probs + 0.25 * generator.standard_normal(shape)
    reference = log_probs + 0.3 * generator.standard_normal(shape)
    mask = generator.random(shape) < 0.6
    mask[:, 0] = True
    return [*rounded(dtype, log_probs, old, generator.standard_normal(shape[0])), mask, *rounded(dtype, reference)]


def ratios_by_loop(log_probs, old, mask, ratio):
    """Of each reply, the ratio that each of its tokens counts with."""
    found = []
    for row in range(len(log_probs)):
        apart = [float(log_probs[row, t]) - float(old[row, t]) for t in numpy.flatnonzero(mask[row])]
        if ratio == "sequence":
            apart = [sum(apart) / max(len(apart), 1)] * len(apart)
        if ratio == "product":
            apart = [sum(apart)] * len(apart)
        found.append([math.exp(each) for each in apart])
    return found


def loss_by_loop(log_probs, old, advantages, mask, reference, options, weighed_at=None):
    """The loss; CISPO's weights, which have no gradient, are those of the log-probabilities `weighed_at`."""
    low = options.get("clip_range", 0.2)
    high = options.get("clip_range_high", low)
    at = weighed_at if weighed_at is not None and options.get("objective") == "cispo" else log_probs
    rows = []
    for row, ratios in enumerate(ratios_by_loop(at, old, mask, options.get("ratio", "token"))):
        losses, advantage = [], float(advantages[row])
        for token, ratio in zip(numpy.flatnonzero(mask[row]), ratios, strict=True):
            policy = float(log_probs[row, token])
            if options.get("objective") == "cispo":
                loss = -min(ratio, 1 + high) * advantage * policy
            else:
                loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
            apart = float(reference[row, token]) - policy
            losses.append(loss + options.get("kl_coef", 0.0) * (math.exp(apart) - 1 - apart))
        rows.append(losses)
    return reduced_by_loop(rows, options)


def reduced_by_loop(rows, options):
    normalization = options.get("normalization", "sequence_mean")
    if normalization == "sequence_mean":
        return sum(sum(row) / max(len(row), 1) for row in rows) / len(rows)
    if normalization == "token_mean":
        return sum(map(sum, rows)) / max(sum(map(len, rows)), 1)
    return sum(map(sum, rows)) / (len(rows) * options["max_length"])


FAMILY = [
    {"ratio": "sequence"},
    {"ratio": "sequence", "clip_range": 0.05, "clip_range_high": 0.02, "normalization": "token_mean"},
    {"ratio": "product", "normalization": "dr_grpo", "max_length": 9},
    {"ratio": "product", "clip_range": 0.4, "kl_coef": 0.2},
    {"objective": "cispo", "clip_range_high": 0.1},
    {"objective": "cispo", "clip_range_high": 4.0, "normalization": "token_mean", "kl_coef": 0.3},
    {"objective": "cispo", "ratio": "sequence", "clip_range_high": 0.02},
]


@pytest.mark.parametrize(
    ("library", "dtype", "options", "shape", "seed"),
    runs(
        [(options, *case) for options in FAMILY for case in (((1, 1), 0), ((5, 7), 1))],
        by_jax=[(options, (5, 7), 1) for options in FAMILY],
    ),
)
def test_the_family_and_its_gradients_match_the_formula_whatever_is_masked_out(library, dtype, options, shape, seed):
    log_probs, old, advantages, mask, reference = clean = replies_of(shape, seed, dtype)
    if shape[0] > 1:
        mask[2] = False  # a reply without tokens

    def by_loop(*given):
        return loss_by_loop(*given, options, weighed_at=log_probs)

    def loss(p, o, a, m, r):
        return grpo_loss(p, o, a, m, reference_log_probs=r, **options)

    spoilt = [numpy.where(mask, each, numpy.asarray(math.nan, each.dtype)) for each in (log_probs, old, reference)]
    beside = advantages.copy()
    beside[~mask.any(1)] = math.nan
    value, (gradient,) = value_and_gradients(library, loss, spoilt[0], spoilt[1], beside, mask, spoilt[2])
    assert (value.shape, value.dtype) == ((), dtype)
    assert_near(value, loss_by_loop(*clean, options))
    assert_near(gradient, differences(by_loop, *clean))


@pytest.mark.parametrize("options", FAMILY, ids=str)
def test_numpy_arrays_give_the_formula_as_well(options):
    given = replies_of((4, 5), 3, "float32")
    found = grpo_loss(*given[:4], reference_log_probs=given[4], **options)
    assert found.dtype == "float32"
    assert_near(found, loss_by_loop(*given, options))


@pytest.mark.parametrize("ratio", ["token", "sequence", "product"])
def test_some_ratios_of_these_cases_are_clipped_and_some_are_not(ratio):
    log_probs, old, _, mask, _ = replies_of((40, 7), 1)
    low, high = 0.1, 0.05
    ratios = ratios_by_loop(log_probs, old, mask, ratio)
    outside = [not 1 - low <= each <= 1 + high for row in ratios for each in row]
    assert 0.05 < sum(outside) / len(outside) < 0.95
    for library in EVERY:
        p, o, m = arrays_of(library, numpy.where(mask, log_probs, math.nan), old, mask)
        assert_near(clip_fraction(p, o, low, m, high, ratio=ratio), sum(outside) / len(outside))
        assert float(clip_fraction(p, o, 1.0, m, 1e9, ratio=ratio)) == 0.0


def test_without_a_mask_all_tokens_of_a_row_are_its_reply():
    log_probs, old, _, _, _ = replies_of((6, 5), 2)
    mask = numpy.ones((6, 5), bool)
    for ratio in ("sequence", "product"):
        expected = [not 0.9 <= each <= 1.1 for row in ratios_by_loop(log_probs, old, mask, ratio) for each in row]
        found = clip_fraction(*map(torch.from_numpy, (log_probs, old)), 0.1, ratio=ratio)
        assert_near(found, sum(expected) / len(expected))


@pytest.mark.parametrize(("library", "dtype"), RUNS)
@pytest.mark.parametrize("options", [{}, {"ratio": "sequence"}, {"ratio": "product"}, {"objective": "cispo"}], ids=str)
def test_on_fresh_samples_every_member_has_the_policy_gradient(library, dtype, options):
    log_probs, _, advantages, mask, _ = replies_of((4, 6), 0, dtype)
    _, (gradient,) = value_and_gradients(library, lambda p, o, a, m: grpo_loss(p, o, a, m, **options),
                                         log_probs, log_probs.copy(), advantages, mask)  # fmt: skip
    scale = numpy.ones(4) if options.get("ratio") == "product" else 1 / mask.sum(1)
    # a product's gradient is that of the sum over tokens, shared by each token of the mean
    assert_near(gradient, numpy.where(mask, -(advantages * scale)[:, None] / 4, 0.0))


@pytest.mark.parametrize(("library", "dtype"), RUNS)
def test_a_product_beyond_every_number_is_clipped_without_a_gradient(library, dtype):
    log_probs, old, mask = (numpy.array(each) for each in ([[0.0, 0.0]], [[-500.0, -600.0]], [[True, True]]))
    given = [*rounded(dtype, log_probs, old, [2.0]), mask]
    value, (gradient,) = value_and_gradients(library, lambda *a: grpo_loss(*a, ratio="product"), *given)
    assert_near(value, -1.2 * 2)
    assert not gradient.any()
    value, (gradient,) = value_and_gradients(library, lambda *a: grpo_loss(*a, objective="cispo"), *given)
    assert numpy.isfinite(gradient).all()
    assert_near(gradient, [[-1.2, -1.2]])


@pytest.mark.parametrize(("library", "dtype"), RUNS)
@pytest.mark.parametrize("options", [{}, {"ratio": "product"}, {"objective": "cispo"}], ids=str)
def test_a_reply_without_an_advantage_adds_nothing_however_large_its_ratio(library, dtype, options):
    given = [*rounded(dtype, [[0.0, 0.0]], [[-500.0, -600.0]], [0.0]), numpy.array([[True, True]])]
    value, (gradient,) = value_and_gradients(library, lambda *a: grpo_loss(*a, **options), *given)
    assert value == 0.0
    assert not gradient.any()


@pytest.mark.parametrize(("library", "dtype"), RUNS)
def test_a_clipped_token_is_learnt_from_by_cispo_alone(library, dtype):
    given = rounded(dtype, [[-1.0]], [[-2.0]], [1.0])
    for objective, expected in (("clip", 0.0), ("cispo", -1.2)):
        _, (gradient,) = value_and_gradients(
            library, lambda *a, objective=objective: grpo_loss(*a, objective=objective), *given, numpy.array([[True]])
        )
        assert_near(gradient, [[expected]])


# --------------------------------------------------------------------------------------------------- the mean of tokens


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize(
    "options", [{}, {"normalization": "token_mean"}, {"normalization": "dr_grpo", "max_length": 8}], ids=str
)
def test_a_mean_over_replies_is_that_of_the_formula(library, options):
    values, *_ = replies_of((4, 6), 5)
    mask = numpy.random.default_rng(1).random((4, 6)) < 0.5
    mask[0] = False
    expected = reduced_by_loop([values[row][mask[row]].tolist() for row in range(4)], options)
    v, m = arrays_of(library, numpy.where(mask, values, math.nan), mask)
    assert_near(mean_over_replies(v, m, **options), expected)
    nothing = mean_over_replies(v, arrays_of(library, numpy.zeros((4, 6), bool))[0], **options)
    assert float(nothing) == 0.0


def test_what_cannot_be_reduced_is_refused():
    values, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ConfigurationError, match=r"mean_over_replies\(normalization='sum'\): unknown"):
        mean_over_replies(values, mask, "sum")
    with pytest.raises(ConfigurationError, match=r"mean_over_replies\(normalization='dr_grpo'\): needs max_length"):
        mean_over_replies(values, mask, "dr_grpo")
    with pytest.raises(ValueError, match=r"mean_over_replies\(values of shape \(3,\)\): needs values \(batch, length"):
        mean_over_replies(values[0], mask[0])
    with pytest.raises(TypeError, match=r"mean_over_replies\(mask of int64\): needs booleans"):
        mean_over_replies(values, mask.long())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": "sequences"}, r"grpo_loss\(ratio='sequences'\): unknown; .*did you mean 'sequence'\?"),
        ({"objective": "cispa"}, r"grpo_loss\(objective='cispa'\): unknown; .*did you mean 'cispo'\?"),
    ],
)
def test_unknown_members_of_the_family_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        grpo_loss(*torch.zeros(2, 2, 3), torch.zeros(2), torch.ones(2, 3, dtype=torch.bool), **options)


def test_a_clipped_share_of_replies_needs_rows():
    with pytest.raises(ConfigurationError, match=r"clip_fraction\(ratio='row'\): unknown"):
        clip_fraction(*torch.zeros(2, 2, 3), 0.2, ratio="row")
    message = r"clip_fraction\(log_probs of shape \(\)\): needs log_probs \(batch, length\)"
    with pytest.raises(ValueError, match=message):
        clip_fraction(torch.tensor(0.0), torch.tensor(0.0), 0.2, ratio="sequence")


# ----------------------------------------------------------------------------------------------------------- advantages


def rloo_by_loop(rewards, group_size, scale):
    found = []
    for start in range(0, len(rewards), group_size):
        group = [float(each) for each in rewards[start : start + group_size]]
        for number, reward in enumerate(group):
            others = group[:number] + group[number + 1 :]
            found.append(reward - sum(others) / len(others))
    return numpy.array(found) / (numpy.std(found, ddof=1) + 1e-4 if scale == "batch" else 1.0)


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", ["batch", "none"])
@pytest.mark.parametrize(("prompts", "group_size", "seed"), [(1, 2, 0), (3, 4, 1), (5, 8, 2)])
def test_leave_one_out_matches_the_formula(library, dtype, scale, prompts, group_size, seed):
    (rewards,) = rounded(dtype, numpy.random.default_rng(seed).standard_normal(prompts * group_size))
    found = rloo_advantages(*arrays_of(library, rewards), group_size, scale)
    assert_near(found, rloo_by_loop(rewards, group_size, scale))
    unscaled = numpy.asarray(rloo_advantages(*arrays_of(library, rewards), group_size))
    of_mean = numpy.asarray(grpo_advantages(*arrays_of(library, rewards), group_size, "none"))
    assert_near(unscaled, of_mean * group_size / (group_size - 1))


def gdpo_by_loop(rewards, weights, group_size):
    totals = numpy.zeros(len(rewards))
    for start in range(0, len(rewards), group_size):
        for column, weight in enumerate(weights):
            group = rewards[start : start + group_size, column].astype("float64")
            scored = group[~numpy.isnan(group)]
            for number, reward in enumerate(group):
                if not math.isnan(reward) and len(scored) > 1:
                    totals[start + number] += (
                        float(weight) * (reward - scored.mean()) / (numpy.std(scored, ddof=1) + 1e-4)
                    )
    return (totals - totals.mean()) / (numpy.std(totals, ddof=1) + 1e-4)


def several_rewards(seed, dtype="float64", rows=12):
    """Rewards of different spread, some of which do not apply; one column has one value in a group, and none in one."""
    generator = numpy.random.default_rng(seed)
    rewards = generator.standard_normal((rows, 3)) * [1.0, 100.0, 0.1]
    rewards[generator.random((rows, 3)) < 0.2] = math.nan
    rewards[0:4, 1] = math.nan
    rewards[5:8, 2] = math.nan
    return rounded(dtype, rewards, [1.0, 0.5, -2.0])


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", [0, 1])
def test_decoupled_normalisation_matches_the_formula(library, dtype, seed):
    rewards, weights = several_rewards(seed, dtype)
    found = gdpo_advantages(*arrays_of(library, rewards, weights), 4)
    assert_near(found, gdpo_by_loop(rewards, weights, 4), 3e-6)


@needs_jax
def test_inside_jit_the_advantages_are_the_same_and_have_no_gradient():
    rewards, weights = several_rewards(0, "float32")
    value, gradients = value_and_gradients("jax", lambda r, w: gdpo_advantages(r, w, 4), rewards, weights, wrt=(0, 1))
    assert_near(value, gdpo_by_loop(rewards, weights, 4), 3e-6)
    assert not any(gradient.any() for gradient in gradients)


def test_a_reward_of_small_spread_counts_as_much_as_one_of_large_spread():
    rewards = torch.tensor([[0.0, 100.0], [1.0, 0.0], [0.0, 0.0], [1.0, 100.0]], dtype=torch.float64)
    advantages = gdpo_advantages(rewards, torch.ones(2, dtype=torch.float64), 4)
    assert abs(advantages[0] - advantages[1]) < 1e-3
    summed = grpo_advantages(rewards.sum(1), 4)
    assert summed[0] > 0 > summed[1]


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize("group_size", [3, 7, 8])
def test_equal_rewards_have_no_advantage_whatever_their_size(library, group_size):
    # their mean is rounded, and the rounding error must not be divided by 1e-4
    (rewards,) = rounded("float32", numpy.random.default_rng(0).uniform(0, 1e4, 200).repeat(group_size))
    column, weight, given = arrays_of(library, rewards[:, None], numpy.ones(1, "float32"), rewards)
    found = [grpo_advantages(given, group_size, scale) for scale in ("group", "batch", "none")]
    found += [rloo_advantages(given, group_size, scale) for scale in ("batch", "none")]
    found.append(gdpo_advantages(column, weight, group_size))
    assert all((each == 0).all() for each in found)


def test_rewards_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"gdpo_advantages\(rewards of shape \(4,\), weights of shape \(2,\)\): needs"):
        gdpo_advantages(torch.zeros(4), torch.ones(2), 2)
    with pytest.raises(ValueError, match=r"weights of shape \(3,\)\): needs rewards \(replies, rewards\)"):
        gdpo_advantages(torch.zeros(4, 2), torch.ones(3), 2)
    with pytest.raises(ValueError, match=r"gdpo_advantages\(rewards of shape \(5, 2\), group_size=2\): needs one"):
        gdpo_advantages(torch.zeros(5, 2), torch.ones(2), 2)
    with pytest.raises(ValueError, match=r"rloo_advantages\(rewards of shape \(5,\), group_size=2\): needs one reward"):
        rloo_advantages(torch.zeros(5), 2)
    for compare in (lambda size: gdpo_advantages(torch.zeros(4, 1), torch.ones(1), size), rloo_advantages_of):
        with pytest.raises(ConfigurationError, match=r"_advantages\(group_size=1\): needs a whole number of replies"):
            compare(1)
    message = r"rloo_advantages\(scale='group'\): unknown; choose one of batch, none"
    with pytest.raises(ConfigurationError, match=message):
        rloo_advantages(torch.zeros(4), 2, "group")


def rloo_advantages_of(size):
    return rloo_advantages(torch.zeros(4), size)


# ------------------------------------------------------------------------------------------------------------------ TRL


@pytest.mark.parametrize(
    ("theirs", "options"),
    [
        ("grpo", {"ratio": "sequence"}),
        ("grpo", {"ratio": "sequence", "clip_range": 0.03, "clip_range_high": 0.04, "kl_coef": 0.1}),
        ("bnpo", {"ratio": "sequence", "normalization": "token_mean"}),
        ("dr_grpo", {"ratio": "sequence", "normalization": "dr_grpo", "max_length": 11}),
        ("cispo", {"objective": "cispo", "normalization": "token_mean", "clip_range_high": 0.1}),
        ("cispo", {"objective": "cispo", "normalization": "token_mean", "clip_range_high": 4.0, "kl_coef": 0.05}),
        ("cispo", {"objective": "cispo", "normalization": "token_mean", "clip_range_high": 0.02, "ratio": "sequence"}),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_family_and_its_gradients_are_trls(theirs, options, seed):
    pytest.importorskip("trl", reason="trl is not there: pip install trl")
    log_probs, old, advantages, mask, reference = map(torch.from_numpy, replies_of((5, 7), seed))
    its, ours = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    low, weight = options.get("clip_range", 0.2), options.get("kl_coef", 0.0)
    high = options.get("clip_range_high", low) + (theirs == "cispo")  # its bound is that of the ratio itself
    expected, _ = trl_trainers.grpo_loss(
        its, old, advantages, mask, theirs, low, high, weight, reference, options.get("max_length"),
        level=options.get("ratio", "token"),
    )  # fmt: skip
    found = grpo_loss(ours, old, advantages, mask, reference_log_probs=reference, **options)
    expected.backward()
    found.backward()
    assert_near(found.detach(), expected.detach(), 1e-9)
    assert_near(ours.grad, its.grad, 1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.4, 0.6)])
def test_whole_replies_as_actions_are_trls_rloo(low, high, seed):
    pytest.importorskip("trl", reason="trl is not there: pip install trl")
    log_probs, old, advantages, mask, _ = map(torch.from_numpy, replies_of((5, 7), seed))
    its, ours = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    expected = trl_trainers.rloo_loss(its, old, advantages, mask, low, high)
    found = grpo_loss(ours, old, advantages, mask, low, high, ratio="product")
    expected.backward()
    found.backward()
    assert_near(found.detach(), expected.detach(), 1e-9)
    assert_near(ours.grad, its.grad, 1e-9)
    row = ppo_policy_loss(*((each * mask).sum(1) for each in (log_probs, old)), advantages, low, None, high)
    assert_near(found.detach(), row, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_familys_advantages_are_trls(seed):
    pytest.importorskip("trl", reason="trl is not there: pip install trl")
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(seed))
    for scale in ("none", "batch"):
        expected = trl_trainers.rloo_advantages(rewards, 4, scale == "batch")
        assert_near(rloo_advantages(rewards, 4, scale), expected)
    several, weights = map(torch.from_numpy, several_rewards(seed, "float32"))
    several[several.isnan().all(1)] = 1.0
    expected = trl_trainers.grpo_advantages(several, 4, "group", weights, decoupled=True)
    assert_near(gdpo_advantages(several, weights, 4), expected, 3e-6)
