"""PPO's and GRPO's losses: formulas by loops, gradients by differences, what a mask keeps out, and TRL's own loss."""

import itertools
import math

import numpy
import pytest
import torch

from pulsetrain.engine.losses import clip_fraction, grpo_loss, kl_estimate, ppo_policy_loss, ppo_value_loss
from tests.support import trl_trainers
from tests.support.formulas import RUNS, arrays_of, assert_near, differences, rounded, runs, value_and_gradients
from tests.support.losses import LIBRARIES, needs_jax

EVERY = ["torch", *LIBRARIES]


def surrogate(log_prob, old, advantage, low, high):
    ratio = math.exp(log_prob - old)
    return max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))


def ppo_by_loop(log_probs, old, advantages, mask=None, low=0.2, high=0.2):
    losses = [
        surrogate(float(log_probs[i]), float(old[i]), float(advantages[i]), low, high)
        for i in numpy.ndindex(*log_probs.shape)
        if mask is None or mask[i]
    ]
    return sum(losses) / len(losses)


def value_loss_by_loop(values, old, returns, mask=None, clip_range=None):
    losses = []
    for i in numpy.ndindex(*values.shape):
        if mask is not None and not mask[i]:
            continue
        loss = (float(values[i]) - float(returns[i])) ** 2
        if clip_range is not None:
            clipped = min(max(float(values[i]), float(old[i]) - clip_range), float(old[i]) + clip_range)
            loss = max(loss, (clipped - float(returns[i])) ** 2)
        losses.append(loss)
    return 0.5 * sum(losses) / len(losses)


def kl_by_loop(log_probs, other, estimator):
    found = numpy.zeros(log_probs.shape)
    for i in numpy.ndindex(*log_probs.shape):
        p, q = math.exp(log_probs[i]), math.exp(other[i])
        found[i] = {"k1": math.log(p / q), "k2": math.log(p / q) ** 2 / 2, "k3": q / p - 1 - math.log(q / p)}[estimator]
    return found


def grpo_by_loop(log_probs, old, advantages, mask, reference, options):
    low = options.get("clip_range", 0.2)
    high, weight = options.get("clip_range_high") or low, options.get("kl_coef", 0.0)
    rows = []
    for i in range(len(log_probs)):
        row = []
        for j in range(len(log_probs[i])):
            if mask[i, j]:
                loss = surrogate(float(log_probs[i, j]), float(old[i, j]), float(advantages[i]), low, high)
                if weight:
                    log_ratio = float(reference[i, j]) - float(log_probs[i, j])
                    loss += weight * (math.exp(log_ratio) - 1 - log_ratio)
                row.append(loss)
        rows.append(row)
    normalization = options.get("normalization", "sequence_mean")
    if normalization == "sequence_mean":
        return sum(sum(row) / max(len(row), 1) for row in rows) / len(rows)
    if normalization == "token_mean":
        return sum(map(sum, rows)) / max(sum(map(len, rows)), 1)
    return sum(map(sum, rows)) / (len(rows) * options["max_length"])


def actions_of(shape, seed, dtype="float64"):
    """Log-probabilities now and then, far enough apart for some to be clipped on either side; and advantages."""
    generator = numpy.random.default_rng(seed)
    log_probs = -2 * generator.random(shape)
    return rounded(dtype, log_probs, log_probs + 0.4 * generator.standard_normal(shape), generator.normal(size=shape))


def mask_of(shape, seed):
    mask = numpy.random.default_rng(seed + 100).random(shape) < 0.6
    mask.flat[0] = True
    return mask


def spoilt(mask, seed, *arrays):
    """The arrays with nan and infinity beside the mask."""
    generator = numpy.random.default_rng(seed + 200)
    wrong = [generator.choice([math.nan, math.inf, -math.inf, 1e30], mask.shape) for _ in arrays]
    return [numpy.where(mask, each, beside.astype(each.dtype)) for each, beside in zip(arrays, wrong, strict=True)]


# --------------------------------------------------------------------------------------------------------------- PPO


RANGES = [(0.2, None), (0.1, 0.4), (0, 0.2), (1.5, 0.1)]


@pytest.mark.parametrize(
    ("library", "dtype", "masked", "ranges", "shape", "seed"),
    runs(
        [(*case, *shape) for case in itertools.product((False, True), RANGES) for shape in (((9,), 0), ((2, 3, 4), 1))],
        by_jax=[(False, RANGES[0], (9,), 0), *((True, ranges, (2, 3, 4), 1) for ranges in RANGES)],
    ),
)
def test_the_clipped_objective_and_its_gradient_match_the_formula(library, dtype, masked, ranges, shape, seed):
    low, high = ranges
    arrays = actions_of(shape, seed, dtype)
    mask = mask_of(shape, seed) if masked else None

    def by_loop(*given):
        return ppo_by_loop(*given, mask, low, low if high is None else high)

    given = [*(spoilt(mask, seed, *arrays) if masked else arrays), mask]
    value, (gradient,) = value_and_gradients(library, lambda p, o, a, m: ppo_policy_loss(p, o, a, low, m, high), *given)
    assert (value.shape, value.dtype) == ((), dtype)
    assert_near(value, by_loop(*arrays))
    assert_near(gradient, differences(by_loop, *arrays))


@pytest.mark.parametrize(("library", "dtype"), RUNS)
def test_just_sampled_tokens_have_the_policy_gradient(library, dtype):
    log_probs, _, advantages = actions_of((6,), 0, dtype)
    value, (gradient,) = value_and_gradients(library, ppo_policy_loss, log_probs, log_probs.copy(), advantages)
    assert_near(value, -advantages.mean())
    assert_near(gradient, -advantages / 6)


@pytest.mark.parametrize(("library", "dtype"), RUNS)
def test_a_ratio_beyond_every_number_is_clipped_without_a_gradient_and_unclipped_where_it_is_worse(library, dtype):
    log_probs, old, advantages = (numpy.array(each, dtype) for each in ([0.0, 0.0], [-1000.0, 0.0], [2.0, 1.0]))
    value, (gradient,) = value_and_gradients(library, ppo_policy_loss, log_probs, old, advantages)
    assert_near(value, -(1.2 * 2 + 1) / 2)
    assert gradient.tolist() == [0.0, -0.5]
    value, _ = value_and_gradients(library, ppo_policy_loss, log_probs, old, -advantages)
    assert value == math.inf


@pytest.mark.parametrize("library", EVERY)
def test_with_a_range_of_1_or_more_no_fall_is_clipped(library):
    log_probs, zeros, advantages = arrays_of(library, numpy.array([-20.0]), numpy.zeros(1), -numpy.ones(1))
    assert_near(ppo_policy_loss(log_probs, zeros, advantages, 0.75), 0.25)
    for low in (1.0, 1.5):
        assert_near(ppo_policy_loss(log_probs, zeros, advantages, low), math.exp(-20), 1e-12)
        assert float(clip_fraction(log_probs, zeros, low)) == 0.0


@pytest.mark.parametrize(("library", "dtype"), RUNS)
@pytest.mark.parametrize("loss", [ppo_policy_loss, ppo_value_loss], ids=["policy", "value"])
def test_where_the_mask_is_nowhere_true_the_loss_is_nan_and_the_gradient_zero(library, dtype, loss):
    arrays = actions_of((2, 3), 0, dtype)
    mask = numpy.zeros((2, 3), bool)
    given = spoilt(mask, 0, *arrays)
    value, (gradient,) = value_and_gradients(library, lambda *a: loss(*a[:3], 0.2, a[3]), *given, mask)
    assert numpy.isnan(value)
    assert not gradient.any()


@pytest.mark.parametrize("library", EVERY)
def test_an_advantage_may_be_shared_along_dimensions_of_length_1(library):
    log_probs, old, advantages = actions_of((3, 4), 0)
    whole = numpy.broadcast_to(advantages[:, :1], (3, 4)).copy()
    mask = mask_of((3, 4), 0)
    p, o, few, many, m = arrays_of(library, log_probs, old, advantages[:, :1], whole, mask)
    assert_near(ppo_policy_loss(p, o, few, mask=m), ppo_by_loop(log_probs, old, whole, mask))
    assert_near(ppo_policy_loss(p, o, few, mask=m), ppo_policy_loss(p, o, many, mask=m), 1e-12)


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize("shape", [(3,), (4,), (4, 1), (1, 3), (3, 4, 1), ()])
def test_advantages_that_would_broadcast_otherwise_are_refused(library, shape):
    log_probs, advantages = arrays_of(library, numpy.zeros((3, 4)), numpy.zeros(shape))
    with pytest.raises(
        ValueError, match=r"log_probs of shape \(3, 4\), advantages of shape .*: needs an advantage for"
    ):
        ppo_policy_loss(log_probs, log_probs, advantages)


@pytest.mark.parametrize(
    ("library", "dtype", "masked", "clip_range", "shape", "seed"),
    runs(
        [
            (*case, *shape)
            for case in itertools.product((False, True), (None, 0.3, 1.0))
            for shape in (((9,), 0), ((3, 5), 1))
        ],
        by_jax=[(False, 0.3, (9,), 0), (True, 0.3, (3, 5), 1), (True, None, (3, 5), 1)],
    ),
)
def test_the_value_loss_and_its_gradient_match_the_formula(library, dtype, masked, clip_range, shape, seed):
    generator = numpy.random.default_rng(seed)
    arrays = rounded(dtype, *generator.standard_normal((3, *shape)))
    mask = mask_of(shape, seed) if masked else None

    def by_loop(*given):
        return value_loss_by_loop(*given, mask, clip_range)

    given = [*(spoilt(mask, seed, *arrays) if masked else arrays), mask]
    value, (gradient,) = value_and_gradients(library, lambda v, o, r, m: ppo_value_loss(v, o, r, clip_range, m), *given)
    assert (value.shape, value.dtype) == ((), dtype)
    assert_near(value, by_loop(*arrays))
    assert_near(gradient, differences(by_loop, *arrays))


@pytest.mark.parametrize(("library", "dtype"), RUNS)
def test_only_what_is_trained_gets_a_gradient(library, dtype):
    arrays = actions_of((3, 4), 0, dtype)
    for loss in (lambda *a: ppo_policy_loss(*a), lambda *a: ppo_value_loss(*a, clip_range=0.1)):
        _, gradients = value_and_gradients(library, loss, *arrays, wrt=(1, 2))
        assert not numpy.any(gradients)
    given = [*arrays[:2], arrays[2][:, 0], arrays[1], mask_of((3, 4), 0)]
    _, gradients = value_and_gradients(
        library, lambda p, o, a, r, m: grpo_loss(p, o, a, m, reference_log_probs=r, kl_coef=0.5), *given, wrt=(1, 2, 3)
    )
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize(("low", "high"), [(0.2, None), (0.1, 0.5), (2.0, 0.1)])
def test_the_clipped_part_is_that_of_the_ratios_outside_the_range(library, low, high):
    log_probs, old, _ = actions_of((4, 6), 0)
    mask = mask_of((4, 6), 0)
    ratios = numpy.exp(log_probs - old)
    outside = (ratios < 1 - low) | (ratios > 1 + (low if high is None else high))
    p, o, m = arrays_of(library, log_probs, old, mask)
    assert 0 < outside[mask].mean() < 1
    assert_near(clip_fraction(p, o, low, clip_range_high=high), outside.mean())
    p, o = arrays_of(library, *spoilt(mask, 0, log_probs, old))
    assert_near(clip_fraction(p, o, low, m, high), outside[mask].mean())


# ---------------------------------------------------------------------------------------------------------------- KL


@pytest.mark.parametrize(
    ("library", "dtype", "estimator", "shape", "seed"),
    runs(
        [(each, *shape) for each in ("k1", "k2", "k3") for shape in (((), 0), ((5,), 1), ((3, 4), 2))],
        by_jax=[(each, (3, 4), 2) for each in ("k3", "k2", "k1")],
    ),
)
def test_estimates_of_kl_and_their_gradients_match_the_formula(library, dtype, estimator, shape, seed):
    arrays = actions_of(shape, seed, dtype)[:2]
    value, gradients = value_and_gradients(library, lambda *a: kl_estimate(*a, estimator), *arrays, wrt=(0, 1))
    assert (value.shape, value.dtype) == (shape, dtype)
    assert_near(value, kl_by_loop(*arrays, estimator))
    for index in (0, 1):
        assert_near(gradients[index], differences(lambda *a: kl_by_loop(*a, estimator), *arrays, wrt=index))


def test_k1_and_k3_are_the_kl_in_expectation_and_k2_has_its_gradient():
    logits, other = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum()
    (gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    # exact over 6 outcomes in place of samples, which know nothing of how likely they were
    expected = {each: (p.detach() * kl_estimate(log_p, log_q, each)).sum() for each in ("k1", "k2", "k3")}
    assert expected["k1"].item() == pytest.approx(kl.item(), rel=1e-12)
    assert expected["k3"].item() == pytest.approx(kl.item(), rel=1e-12)
    its = {each: torch.autograd.grad(value, logits, retain_graph=True)[0] for each, value in expected.items()}
    assert_near(its["k2"], gradient, 1e-12)
    assert_near(its["k1"], torch.zeros(6), 1e-12)
    assert not torch.allclose(its["k3"], gradient, rtol=0.01)


@pytest.mark.parametrize("library", EVERY)
def test_k3_of_two_that_are_almost_equal_keeps_its_digits_and_is_not_negative(library):
    difference = numpy.array([1e-3, -1e-3, 1e-2, 0.0], "float32")
    zeros, moved = arrays_of(library, numpy.zeros(4, "float32"), difference)
    found = numpy.asarray(kl_estimate(zeros, moved, "k3"))
    assert (found >= 0).all()
    numpy.testing.assert_allclose(found, numpy.expm1(difference.astype("f8")) - difference.astype("f8"), rtol=1e-3)


# -------------------------------------------------------------------------------------------------------------- GRPO

OPTIONS = [
    {},
    {"clip_range": 0.1, "clip_range_high": 0.3},
    {"normalization": "token_mean"},
    {"normalization": "dr_grpo", "max_length": 9},
    {"kl_coef": 0.3},
    {"kl_coef": 0.1, "normalization": "token_mean", "clip_range_high": 0.28},
    {"kl_coef": 2.0, "normalization": "dr_grpo", "max_length": 4},
]


@pytest.mark.parametrize(
    ("library", "dtype", "options", "shape", "seed"),
    runs(
        [(options, *shape) for options in OPTIONS for shape in (((1, 1), 0), ((4, 7), 1))],
        by_jax=[(options, (4, 7), 1) for options in OPTIONS[::-1]],
    ),
)
def test_grpo_and_its_gradient_match_the_formula_whatever_is_masked_out(library, dtype, options, shape, seed):
    log_probs, old, reference = actions_of(shape, seed, dtype)
    (advantages,) = rounded(dtype, numpy.random.default_rng(seed).standard_normal(shape[0]))
    mask = mask_of(shape, seed)
    if shape[0] > 1:
        mask[1] = False
    clean = [log_probs, old, advantages, mask, reference]

    def by_loop(*given):
        return grpo_by_loop(*given, options)

    def loss(p, o, a, m, r):
        return grpo_loss(p, o, a, m, reference_log_probs=r, **options)

    log_probs, old, reference = spoilt(mask, seed, log_probs, old, reference)
    value, (gradient,) = value_and_gradients(library, loss, log_probs, old, advantages, mask, reference)
    assert (value.shape, value.dtype) == ((), dtype)
    assert_near(value, by_loop(*clean))
    assert_near(gradient, differences(by_loop, *clean))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_grpo_of_numpy_arrays_is_that_of_the_formula(options):
    log_probs, old, reference = actions_of((4, 5), 3, "float32")
    advantages, mask = numpy.array([1, -1, 0.5, -0.5], "float32"), mask_of((4, 5), 3)
    found = grpo_loss(log_probs, old, advantages, mask, reference_log_probs=reference, **options)
    assert found.dtype == "float32"
    assert_near(found, grpo_by_loop(log_probs, old, advantages, mask, reference, options))


@pytest.mark.parametrize(("library", "dtype"), RUNS)
@pytest.mark.parametrize("options", OPTIONS[:1] + OPTIONS[2:4], ids=str)
def test_replies_without_a_token_have_no_loss_and_no_gradient(library, dtype, options):
    log_probs, old, _ = actions_of((2, 3), 0, dtype)
    mask = numpy.zeros((2, 3), bool)
    arrays = [*spoilt(mask, 0, log_probs, old), numpy.array([math.nan, 1.0], dtype), mask]
    value, (gradient,) = value_and_gradients(library, lambda *a: grpo_loss(*a, **options), *arrays)
    assert value == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("library", EVERY)
def test_half_precision_losses_are_computed_in_float32(library):
    log_probs, old, advantages = actions_of((2, 300), 0, "float16")
    wide = [each.astype("float32") for each in (log_probs, old, advantages)]
    mask = mask_of((2, 300), 0)
    p, o, a, m, *w = arrays_of(library, log_probs, old, advantages, mask, *wide)
    for halves, expected in (
        (ppo_policy_loss(p, o, a, mask=m), ppo_policy_loss(*w, mask=m)),
        (ppo_value_loss(p, o, a, 0.1, m), ppo_value_loss(*w, 0.1, m)),
        (grpo_loss(p, o, a[:, 0], m), grpo_loss(w[0], w[1], w[2][:, 0], m)),
    ):
        assert "float32" in str(halves.dtype)
        assert_near(halves, expected)


@pytest.mark.slow
@needs_jax
def test_numpy_arrays_beside_jaxs_are_taken():
    log_probs, old, _ = actions_of((2, 3), 0, "float32")
    advantages, mask = numpy.array([1, -1], "float32"), numpy.full((2, 3), True)
    (array,) = arrays_of("jax", log_probs)
    assert_near(grpo_loss(array, old, advantages, mask), grpo_loss(log_probs, old, advantages, mask))


# --------------------------------------------------------------------------------------------------------------- TRL


@pytest.mark.parametrize(
    ("theirs", "options"),
    [
        ("grpo", {}),
        ("grpo", {"clip_range": 0.1, "clip_range_high": 0.3, "kl_coef": 0.05}),
        ("bnpo", {"normalization": "token_mean", "kl_coef": 0.5}),
        ("dapo", {"normalization": "token_mean", "clip_range_high": 0.28}),
        ("dr_grpo", {"normalization": "dr_grpo", "max_length": 11, "kl_coef": 0.04}),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_and_its_gradient_are_trls(theirs, options, seed):
    pytest.importorskip("trl", reason="trl is not there: pip install trl")
    log_probs, old, reference = map(torch.from_numpy, actions_of((5, 7), seed))
    mask = torch.from_numpy(mask_of((5, 7), seed))
    advantages = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    its, ours = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    low, weight = options.get("clip_range", 0.2), options.get("kl_coef", 0.0)
    high = options.get("clip_range_high", low)
    expected, logged = trl_trainers.grpo_loss(
        its, old, advantages, mask, theirs, low, high, weight, reference, options.get("max_length")
    )
    found = grpo_loss(ours, old, advantages, mask, reference_log_probs=reference, **options)
    expected.backward()
    found.backward()
    assert_near(found.detach(), expected.detach(), 1e-9)
    assert_near(ours.grad, its.grad, 1e-9)
    if weight:
        assert kl_estimate(log_probs, reference, "k3")[mask].mean().item() == pytest.approx(logged["kl"], rel=1e-6)


def test_grpo_names_arguments_that_are_not_arrays():
    with pytest.raises(TypeError, match="list is not a supported array type"):
        grpo_loss([[0.0]], [[0.0]], [1.0], None)
