"""Log-probabilities of tokens and DPO: formulas by loops, gradients by differences, and TRL's own losses."""

import functools
import itertools
import math
import re

import numpy
import pytest
import torch

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import dpo_loss, entropy, implicit_rewards, masked_sum_log_probs, token_log_probs
from tests.support import trl_trainers
from tests.support.formulas import RUNS, arrays_of, assert_near, differences, rounded, runs, value_and_gradients
from tests.support.losses import LIBRARIES, needs_jax

EVERY = ["torch", *LIBRARIES]
SHAPES = [(), (5,), (2, 3)]
OF_TOKENS = runs([(seed, shape) for seed in (0, 1) for shape in SHAPES], by_jax=[(0, shape) for shape in SHAPES[::-1]])


def log_softmax_by_loop(row):
    largest = max(row)
    total = sum(math.exp(each - largest) for each in row)
    return [each - largest - math.log(total) for each in row]


def token_log_probs_by_loop(logits, tokens):
    found = numpy.zeros(tokens.shape)
    for index in numpy.ndindex(*tokens.shape):
        found[index] = log_softmax_by_loop([float(each) for each in logits[index]])[tokens[index]]
    return found


def entropy_by_loop(logits):
    found = numpy.zeros(logits.shape[:-1])
    for index in numpy.ndindex(*found.shape):
        row = log_softmax_by_loop([float(each) for each in logits[index]])
        found[index] = -sum(math.exp(each) * each for each in row if each > -math.inf)
    return found


def sums_by_loop(log_probs, mask, average):
    found = []
    for row, counts in zip(log_probs, mask, strict=True):
        taken = [float(each) for each, counted in zip(row, counts, strict=True) if counted]
        found.append(sum(taken) / (max(len(taken), 1) if average else 1))
    return numpy.array(found)


def dpo_by_loop(chosen, rejected, of_chosen, of_rejected, beta, loss_type, smoothing):
    losses = []
    for i in range(len(chosen)):
        h = float(chosen[i]) - float(rejected[i])
        if of_chosen is not None:
            h -= float(of_chosen[i]) - float(of_rejected[i])
        if loss_type == "sigmoid":
            right, wrong = 1 / (1 + math.exp(-beta * h)), 1 / (1 + math.exp(beta * h))
            losses.append(-(1 - smoothing) * math.log(right) - smoothing * math.log(wrong))
        elif loss_type == "hinge":
            losses.append(max(0.0, 1 - beta * h))
        else:
            losses.append((h - 1 / (2 * beta)) ** 2)
    return sum(losses) / len(losses)


def logits_and_tokens(shape, seed, dtype="float64"):
    generator = numpy.random.default_rng(seed)
    logits = (3 * generator.standard_normal((*shape, 7))).astype(dtype)
    return logits, numpy.asarray(generator.integers(7, size=shape))


def pairs_of(size, seed, dtype="float64"):
    """Log-probabilities of replies: by the policy, then by a reference near to it."""
    generator = numpy.random.default_rng(seed)
    policy = -5 * generator.random((2, size))
    return rounded(dtype, *policy, *(policy + generator.standard_normal((2, size))))


# --------------------------------------------------------------------------------------- tokens, their sums, entropy


@pytest.mark.parametrize(("library", "dtype", "seed", "shape"), OF_TOKENS)
def test_log_probabilities_of_tokens_and_their_gradient_match_the_formula(library, dtype, seed, shape):
    logits, tokens = logits_and_tokens(shape, seed, dtype)
    value, (gradient,) = value_and_gradients(library, token_log_probs, logits, tokens)
    assert (value.shape, value.dtype) == (shape, dtype)
    assert_near(value, token_log_probs_by_loop(logits, tokens))
    assert_near(gradient, differences(token_log_probs_by_loop, logits, tokens))


@pytest.mark.parametrize(("library", "dtype", "seed", "shape"), OF_TOKENS)
def test_entropy_and_its_gradient_match_the_formula(library, dtype, seed, shape):
    logits, _ = logits_and_tokens(shape, seed, dtype)
    value, (gradient,) = value_and_gradients(library, entropy, logits)
    assert (value.shape, value.dtype) == (shape, dtype)
    assert_near(value, entropy_by_loop(logits))
    assert_near(gradient, differences(entropy_by_loop, logits))


@pytest.mark.parametrize(("library", "dtype"), RUNS)
def test_an_impossible_token_adds_nothing_to_the_entropy_or_its_gradient(library, dtype):
    logits = numpy.array([[1.0, -math.inf, 2.0, -math.inf], [0.0, -math.inf, -math.inf, -math.inf]], dtype)
    value, (gradient,) = value_and_gradients(library, entropy, logits)
    assert_near(value, entropy_by_loop(logits))
    assert value[1] == 0.0
    _, (alone,) = value_and_gradients(library, entropy, numpy.ascontiguousarray(logits[:1, ::2]))
    assert_near(gradient, [[alone[0, 0], 0.0, alone[0, 1], 0.0], [0.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize("library", EVERY)
def test_large_logits_lose_no_digits(library):
    logits, tokens = logits_and_tokens((4,), 0, "float32")
    near, far, ids = arrays_of(library, logits, logits + numpy.float32(8192), tokens)
    (back,) = arrays_of(library, (logits + numpy.float32(8192)) - numpy.float32(8192))
    assert_near(token_log_probs(far, ids), token_log_probs(back, ids))
    assert_near(entropy(far), entropy(back))
    assert not numpy.allclose(near, far)


@pytest.mark.parametrize("library", EVERY)
def test_half_precision_is_computed_in_float32(library):
    logits, tokens = logits_and_tokens((50,), 0, "float16")
    halves, wide, ids = arrays_of(library, logits, logits.astype("float32"), tokens)
    assert "float32" in str(token_log_probs(halves, ids).dtype)
    assert_near(token_log_probs(halves, ids), token_log_probs(wide, ids))
    assert_near(entropy(halves), entropy(wide))
    log_probs, mask = arrays_of(library, numpy.full((1, 5000), -20, "float16"), numpy.full((1, 5000), True))
    assert masked_sum_log_probs(log_probs, mask).tolist() == [-100_000.0]


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
def test_tokens_may_be_of_any_whole_number_type(library, dtype):
    logits, tokens = logits_and_tokens((2, 3), 0)
    scores, ids = arrays_of(library, logits, tokens.astype(dtype))
    assert_near(token_log_probs(scores, ids), token_log_probs_by_loop(logits, tokens))


@pytest.mark.parametrize(
    ("library", "dtype", "average", "seed"),
    runs([(average, seed) for average in (False, True) for seed in (0, 1, 2)], by_jax=[(True, 0), (False, 1)]),
)
def test_sums_over_a_mask_match_the_formula_whatever_is_masked_out(library, dtype, average, seed):
    generator = numpy.random.default_rng(seed)
    log_probs = generator.standard_normal((5, 6)).astype(dtype)
    mask = generator.random((5, 6)) < 0.6
    mask[2] = False
    beside = numpy.where(mask, log_probs, generator.choice([math.nan, -math.inf, math.inf], (5, 6)).astype(dtype))
    value, (gradient,) = value_and_gradients(library, lambda x, m: masked_sum_log_probs(x, m, average), beside, mask)
    assert (value.shape, value.dtype) == ((5,), dtype)
    assert_near(value, sums_by_loop(log_probs, mask, average))
    assert value[2] == 0.0
    assert_near(gradient, differences(lambda x, m: sums_by_loop(x, m, average), log_probs, mask))


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize(
    ("logits", "tokens", "remedy"),
    [
        ((2, 4, 7), (2, 4, 1), r"; pass tokens.squeeze\(-1\)"),
        ((2, 4, 7), (2, 5), r"; pass tokens\[..., 1:\], which the logits of all positions but the last predict"),
        ((2, 4, 7), (2, 3), r"; pass logits\[..., :-1, :\], since the token after the last position is unknown"),
        ((2, 4, 7), (4, 2), ""),
        ((2, 4, 7), (2, 4, 7), ""),
        ((), (), ""),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_what_to_pass(library, logits, tokens, remedy):
    arrays = arrays_of(library, numpy.zeros(logits), numpy.zeros(tokens, "int64"))
    rule = rf"{re.escape(str(tokens))}\): needs logits \(..., vocabulary\) and tokens \(...\){remedy}$"
    with pytest.raises(ValueError, match=rf"token_log_probs\(logits of shape {re.escape(str(logits))}.*{rule}"):
        token_log_probs(*arrays)


@pytest.mark.parametrize("library", EVERY)
def test_what_is_neither_a_token_nor_a_logit_is_refused(library):
    logits, halves, ids = arrays_of(library, numpy.zeros((2, 7)), numpy.zeros(2), numpy.zeros((2, 7), "int32"))
    with pytest.raises(TypeError, match=r"token_log_probs\(tokens: .* float\d\d \(2,\)\): needs whole numbers"):
        token_log_probs(logits, halves)
    with pytest.raises(TypeError, match=r"token_log_probs\(logits: .* int32 \(2, 7\)\): needs floating point"):
        token_log_probs(ids, ids[:, 0])
    with pytest.raises(TypeError, match=r"entropy\(logits: .* int32 \(2, 7\)\): needs floating point"):
        entropy(ids)
    with pytest.raises(ValueError, match=r"entropy\(logits of shape \(\)\): needs logits \(..., vocabulary\)"):
        entropy(logits.sum())


@pytest.mark.parametrize("library", EVERY)
@pytest.mark.parametrize(("wrong", "shape", "at"), [(-100, (2, 3), "[1, 2]"), (7, (3,), "[2]"), (-1, (), "")])
def test_a_token_outside_the_vocabulary_is_named(library, wrong, shape, at):
    logits, tokens = logits_and_tokens(shape, 0)
    tokens = numpy.array(tokens)
    tokens[(-1,) * len(shape)] = wrong
    message = (
        rf"token_log_probs\(tokens{re.escape(at)}={wrong}\): needs ids from 0 to 6.*, and 1 of . tokens are outside"
    )
    with pytest.raises(ValueError, match=message):
        token_log_probs(*arrays_of(library, logits, tokens))


@needs_jax
def test_inside_jit_a_token_outside_the_vocabulary_has_nan_for_its_log_probability():
    import jax

    logits, tokens = logits_and_tokens((4,), 0)
    tokens[1:3] = -1, 7
    found = jax.jit(token_log_probs)(*arrays_of("jax", logits, tokens))
    assert numpy.isnan(found).tolist() == [False, True, True, False]


@pytest.mark.parametrize("library", EVERY)
def test_a_mask_that_does_not_fit_is_refused(library):
    log_probs, mask, whole = arrays_of(library, numpy.zeros((2, 3)), numpy.full((3, 2), True), numpy.ones((2, 3), int))
    with pytest.raises(ValueError, match=r"log_probs of shape \(2, 3\), mask of shape \(3, 2\)\): needs equal shapes"):
        masked_sum_log_probs(log_probs, mask)
    with pytest.raises(TypeError, match=r"masked_sum_log_probs\(mask of int\d\d\): needs booleans; pass mask != 0"):
        masked_sum_log_probs(log_probs, whole)
    with pytest.raises(ValueError, match=r"masked_sum_log_probs\(log_probs of shape \(\)\): needs rows of tokens"):
        masked_sum_log_probs(log_probs.sum(), mask.all())


# --------------------------------------------------------------------------------------------------------------- DPO

LOSSES = [
    ("sigmoid", 0.1, 0.0),
    ("sigmoid", 0.5, 0.1),
    ("sigmoid", 2.0, 0.49),
    ("hinge", 0.5, 0.0),
    ("ipo", 0.1, 0.0),
    ("ipo", 1.0, 0.0),
]


@pytest.mark.parametrize(
    ("library", "dtype", "with_reference", "loss", "size", "seed"),
    runs(
        [(*case, *size) for case in itertools.product((True, False), LOSSES) for size in ((1, 0), (7, 1))],
        by_jax=[*((True, loss, 7, 1) for loss in LOSSES), (False, LOSSES[1], 7, 1)],
    ),
)
def test_dpo_and_its_gradients_match_the_formula(library, dtype, with_reference, loss, size, seed):
    loss_type, beta, smoothing = loss
    chosen, rejected, *references = pairs_of(size, seed, dtype)
    arrays = [chosen, rejected, *(references if with_reference else (None, None))]

    def by_loop(*given):
        return dpo_by_loop(*given, beta, loss_type, smoothing)

    value, gradients = value_and_gradients(
        library, lambda *given: dpo_loss(*given, beta, loss_type, smoothing), *arrays, wrt=(0, 1)
    )
    assert (value.shape, value.dtype) == ((), dtype)
    assert_near(value, by_loop(*arrays))
    for index in (0, 1):
        assert_near(gradients[index], differences(by_loop, *arrays, wrt=index))


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_dpo_of_numpy_arrays_is_that_of_the_formula(loss_type):
    arrays = pairs_of(5, 3, "float32")
    found = dpo_loss(*arrays, beta=0.3, loss_type=loss_type)
    assert found.dtype == "float32"
    assert_near(found, dpo_by_loop(*arrays, 0.3, loss_type, 0.0))


@pytest.mark.parametrize(("library", "dtype"), RUNS)
def test_no_gradient_goes_through_the_reference_nor_through_rewards(library, dtype):
    arrays = pairs_of(4, 0, dtype)
    _, gradients = value_and_gradients(library, dpo_loss, *arrays, wrt=(2, 3))
    assert not numpy.any(gradients)
    _, gradients = value_and_gradients(library, implicit_rewards, *arrays[:2], wrt=(0, 1))
    assert not numpy.any(gradients)


@pytest.mark.parametrize("library", EVERY)
def test_rewards_are_beta_times_the_log_ratio(library):
    policy, reference = pairs_of(4, 0)[::2]
    given = arrays_of(library, policy, reference)
    assert_near(implicit_rewards(*given, beta=0.3), 0.3 * (policy - reference))
    assert_near(implicit_rewards(given[0]), 0.1 * policy)


@pytest.mark.parametrize("library", EVERY)
def test_a_policy_equal_to_its_reference_has_the_loss_ln_2(library):
    chosen, rejected, *_ = arrays_of(library, *pairs_of(4, 0))
    assert float(dpo_loss(chosen, rejected, chosen, rejected)) == pytest.approx(math.log(2))


@pytest.mark.parametrize(("library", "dtype"), RUNS)
@pytest.mark.parametrize("h", [1e4, -1e4])
def test_pairs_far_apart_have_finite_losses_and_gradients(library, dtype, h):
    arrays = [numpy.array([h], dtype), numpy.array([0.0], dtype)]
    value, (gradient,) = value_and_gradients(library, dpo_loss, *arrays)
    assert_near(value, max(0.0, -0.1 * h))
    assert_near(gradient, [0.0 if h > 0 else -0.1])


@pytest.mark.parametrize(("library", "dtype"), RUNS)
def test_a_pair_at_or_beyond_the_hinge_has_no_gradient_and_a_nan_is_not_hidden(library, dtype):
    arrays = [numpy.array([2.0, 3.0, 1.0, math.nan], dtype), numpy.zeros(4, dtype)]
    loss = functools.partial(dpo_loss, beta=0.5, loss_type="hinge")
    for pair, (value, gradient) in enumerate([(0.0, 0.0), (0.0, 0.0), (0.5, -0.5), (math.nan, -0.5)]):
        given = [each[pair : pair + 1] for each in arrays]
        found, (its,) = value_and_gradients(library, loss, *given)
        numpy.testing.assert_array_equal(found, value)
        assert its.tolist() == [gradient]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0}, r"dpo_loss\(beta=0\): needs a positive number"),
        ({"beta": math.inf}, r"dpo_loss\(beta=inf\): needs a positive number"),
        ({"beta": math.nan}, r"dpo_loss\(beta=nan\): needs a positive number"),
        ({"beta": "a"}, r"dpo_loss\(beta='a'\): needs a positive number"),
        ({"loss_type": "sigmod"}, r"dpo_loss\(loss_type='sigmod'\): unknown; .*did you mean 'sigmoid'\?"),
        ({"loss_type": None}, r"dpo_loss\(loss_type=None\): unknown; choose one of aot, aot_unpaired, apo"),
        ({"label_smoothing": 0.5}, r"dpo_loss\(label_smoothing=0.5\): needs a number of at least 0 and below 0.5"),
        ({"label_smoothing": -0.1}, r"dpo_loss\(label_smoothing=-0.1\): needs a number of at least 0"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, r"label_smoothing=0.1, loss_type='ipo'\): only aot, .* take"),
        ({"label_smoothing": 0.1, "loss_type": "hinge"}, r"loss_type='hinge'\): only .*, sigmoid take label smoot"),
        ({"reference_chosen": torch.zeros(2)}, r"dpo_loss\(reference_rejected=None\): needs both references or none"),
        ({"reference_rejected": torch.zeros(2)}, r"dpo_loss\(reference_chosen=None\): needs both references or none"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        dpo_loss(torch.zeros(2), torch.zeros(2), **options)


@pytest.mark.parametrize("library", EVERY)
def test_replies_that_do_not_fit_are_refused(library):
    two, three, tokens = arrays_of(library, numpy.zeros(2), numpy.zeros(3), numpy.zeros((2, 3)))
    with pytest.raises(
        ValueError, match=r"policy_chosen of shape \(2,\), policy_rejected of shape \(3,\)\): needs equ"
    ):
        dpo_loss(two, three)
    with pytest.raises(ValueError, match=r"reference_rejected of shape \(3,\)\): needs equal shapes"):
        dpo_loss(two, two, two, three)
    with pytest.raises(ValueError, match=r"\(2, 3\)\): needs a number for each reply.*masked_sum_log_probs sums"):
        dpo_loss(tokens, tokens)
    with pytest.raises(ValueError, match=r"implicit_rewards\(policy of shape \(2,\), reference of shape \(3,\)\)"):
        implicit_rewards(two, three)
    with pytest.raises(ConfigurationError, match=r"implicit_rewards\(beta=-1\): needs a positive number"):
        implicit_rewards(two, beta=-1)


def test_arrays_of_two_libraries_are_refused():
    tensor, array = torch.zeros(2), numpy.zeros(2)
    with pytest.raises(
        TypeError, match=r"dpo_loss\(torch.Tensor float32 \(2,\), numpy.ndarray float64 \(2,\)\): needs"
    ):
        dpo_loss(tensor, array)
    with pytest.raises(TypeError, match=r"token_log_probs\(.*\): needs arrays of one library"):
        token_log_probs(tensor, array)


# --------------------------------------------------------------------------------------------------------------- TRL


def trls():
    return pytest.importorskip("trl", reason="trl is not there: pip install trl")


def tokens_of_pairs(seed):
    generator = torch.Generator().manual_seed(seed)
    policy = -3 * torch.rand(8, 6, generator=generator, dtype=torch.float64)
    reference = policy + 0.5 * torch.randn(8, 6, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 7, (8,), generator=generator)
    return policy, reference, torch.arange(6) < lengths[:, None]


@pytest.mark.parametrize(("loss_type", "beta"), [("sigmoid", 0.1), ("sigmoid", 1.5), ("hinge", 0.7), ("ipo", 0.2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_dpo_and_its_gradient_are_trls(loss_type, beta, seed):
    trls()
    policy, reference, mask = tokens_of_pairs(seed)
    theirs, ours = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    expected = trl_trainers.dpo_loss(theirs, reference, mask, beta, loss_type)
    sums = [masked_sum_log_probs(each, mask, average=loss_type == "ipo").chunk(2) for each in (ours, reference)]
    found = dpo_loss(*sums[0], *sums[1], beta=beta, loss_type=loss_type)
    expected.backward()
    found.backward()
    assert_near(found.detach(), expected.detach(), 1e-9)
    assert_near(ours.grad, theirs.grad, 1e-9)


def test_label_smoothing_is_trls():
    trls()
    policy, reference, mask = tokens_of_pairs(2)
    # of its losses that take smoothing, "aot" is the same for a single pair, where there is nothing to sort
    expected = [
        trl_trainers.dpo_loss(policy[[i, i + 4]], reference[[i, i + 4]], mask[[i, i + 4]], 0.3, "aot", 0.2)
        for i in range(4)
    ]
    sums = [masked_sum_log_probs(each, mask).chunk(2) for each in (policy, reference)]
    found = dpo_loss(*sums[0], *sums[1], beta=0.3, label_smoothing=0.2)
    assert_near(found, torch.stack(expected).mean(), 1e-9)


def test_log_probabilities_of_tokens_and_entropy_are_trls():
    trls()
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits, tokens = (torch.from_numpy(each) for each in logits_and_tokens((3, 4), 5))
    assert_near(token_log_probs(logits, tokens), selective_log_softmax(logits, tokens), 1e-9)
    assert_near(entropy(logits), entropy_from_logits(logits), 1e-9)
