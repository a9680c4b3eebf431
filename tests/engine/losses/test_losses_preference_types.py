"""Every type of DPO's loss: formulas by loops, gradients by differences, and TRL's own losses."""

import functools
import math
import re

import numpy
import pytest
import torch

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import dpo_loss, masked_sum_log_probs
from pulsetrain.engine.losses.preference import OF_MEANS
from tests.support import trl_trainers
from tests.support.formulas import RUNS, assert_near, differences, rounded, runs, value_and_gradients


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x):
    return math.exp(log_sigmoid(x))


def one_pair(c, r, beta, loss_type, e, tau):
    """The loss of a pair from its log-ratios."""
    x = beta * (c - r)
    if loss_type in ("sigmoid", "sigmoid_norm"):
        return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)
    if loss_type == "robust":
        return ((1 - e) * -log_sigmoid(x) - e * -log_sigmoid(-x)) / (1 - 2 * e)
    if loss_type == "hinge":
        return max(0.0, 1 - x)
    if loss_type == "ipo":
        return (c - r - 1 / (2 * beta)) ** 2
    if loss_type == "exo_pair":
        return sigmoid(x) * math.log(sigmoid(x) / (1 - e)) + sigmoid(-x) * math.log(sigmoid(-x) / e)
    if loss_type == "nca_pair":
        return -log_sigmoid(beta * c) - (log_sigmoid(-beta * c) + log_sigmoid(-beta * r)) / 2
    if loss_type == "bco_pair":
        return -log_sigmoid(beta * c) - log_sigmoid(-beta * r)
    if loss_type == "sppo_hard":
        return (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2
    if loss_type == "apo_zero":
        return 1 - sigmoid(beta * c) + sigmoid(beta * r)
    if loss_type == "apo_down":
        return sigmoid(beta * c) + 1 - sigmoid(x)
    assert loss_type == "discopop"
    share = sigmoid(x / tau)
    return (1 - share) * -log_sigmoid(x) + share * math.exp(-x)


def by_loop(chosen, rejected, of_chosen, of_rejected, beta, loss_type, e, tau=0.05):
    policy = [[float(each) for each in side] for side in (chosen, rejected)]
    zeros = [0.0] * len(policy[0])
    reference = [zeros if side is None else [float(each) for each in side] for side in (of_chosen, of_rejected)]
    ratios = [[p - q for p, q in zip(*both, strict=True)] for both in zip(policy, reference, strict=True)]
    if loss_type == "aot":
        margins = [sorted(one - other for one, other in zip(*sides, strict=True)) for sides in (policy, reference)]
        ratios, loss_type = margins, "sigmoid"
    elif loss_type == "aot_unpaired":
        ratios, loss_type = [sorted(side) for side in ratios], "sigmoid"
    losses = [one_pair(c, r, beta, loss_type, e, tau) for c, r in zip(*ratios, strict=True)]
    return sum(losses) / len(losses)


def pairs_of(size, seed, dtype="float64"):
    """Log-probabilities of replies: by the policy, then by a reference near to it."""
    generator = numpy.random.default_rng(seed)
    policy = -5 * generator.random((2, size))
    return rounded(dtype, *policy, *(policy + generator.standard_normal((2, size))))


LOSSES = [
    ("robust", 0.3, 0.0),
    ("robust", 0.5, 0.2),
    ("exo_pair", 0.4, 0.001),
    ("exo_pair", 1.5, 0.3),
    ("nca_pair", 0.3, 0.0),
    ("bco_pair", 0.3, 0.0),
    ("sppo_hard", 0.2, 0.0),
    ("aot", 0.3, 0.0),
    ("aot", 0.7, 0.1),
    ("aot_unpaired", 0.3, 0.0),
    ("aot_unpaired", 0.7, 0.1),
    ("apo_zero", 0.5, 0.0),
    ("apo_down", 0.5, 0.0),
    ("discopop", 0.1, 0.0),
    ("sigmoid_norm", 2.0, 0.0),
]


@pytest.mark.parametrize(
    ("library", "dtype", "with_reference", "loss"),
    runs(
        [(with_reference, loss) for with_reference in (True, False) for loss in LOSSES],
        by_jax=[*((True, loss) for loss in LOSSES[1:]), (False, LOSSES[7])],
    ),
)
def test_each_type_and_its_gradients_match_the_formula(library, dtype, with_reference, loss):
    loss_type, beta, smoothing = loss
    chosen, rejected, *references = pairs_of(7, 1, dtype)
    arrays = [chosen, rejected, *(references if with_reference else (None, None))]
    value, gradients = value_and_gradients(
        library, lambda *given: dpo_loss(*given, beta, loss_type, smoothing), *arrays, wrt=(0, 1)
    )
    assert (value.shape, value.dtype) == ((), dtype)

    def formula(*given):
        return by_loop(*given, beta, loss_type, smoothing)

    assert_near(value, formula(*arrays))
    for index in (0, 1):
        assert_near(gradients[index], differences(formula, *arrays, wrt=index))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_numpy_arrays_is_that_of_the_formula(loss):
    loss_type, beta, smoothing = loss
    arrays = pairs_of(5, 3)
    assert_near(dpo_loss(*arrays, beta, loss_type, smoothing), by_loop(*arrays, beta, loss_type, smoothing), 1e-12)


@pytest.mark.parametrize("tau", [0.05, 0.7, 2.0])
def test_discopop_changes_between_its_terms_as_sharply_as_tau_says(tau):
    arrays = pairs_of(5, 3)
    found = dpo_loss(*arrays, 0.2, "discopop", discopop_tau=tau)
    assert_near(found, by_loop(*arrays, 0.2, "discopop", 0.0, tau), 1e-12)


@pytest.mark.parametrize(("library", "dtype"), RUNS)
@pytest.mark.parametrize(
    "loss_type", ["robust", "exo_pair", "nca_pair", "bco_pair", "apo_zero", "apo_down", "discopop"]
)
@pytest.mark.parametrize("h", [3e3, -3e3])
def test_pairs_far_apart_have_finite_losses_and_gradients(library, dtype, loss_type, h):
    arrays = [numpy.array([h], dtype), numpy.array([-h], dtype)]
    smoothing = 0.1 if loss_type in ("robust", "exo_pair") else 0.0
    loss = functools.partial(dpo_loss, loss_type=loss_type, label_smoothing=smoothing)
    value, gradients = value_and_gradients(library, loss, *arrays, wrt=(0, 1))
    assert numpy.isfinite([value, *gradients[0], *gradients[1]]).all()


def test_sorting_compares_the_pairs_of_a_batch_with_each_other():
    chosen, rejected, *references = map(torch.from_numpy, pairs_of(6, 0))
    moved = torch.roll(rejected, 1), torch.roll(references[1], 1)
    for loss_type, same in (("aot_unpaired", True), ("aot", False), ("sigmoid", False)):
        one = dpo_loss(chosen, rejected, *references, loss_type=loss_type)
        other = dpo_loss(chosen, moved[0], references[0], moved[1], loss_type=loss_type)
        assert torch.allclose(one, other, rtol=0, atol=1e-12) is same, loss_type


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "exo_pair"}, r"label_smoothing=0.0, loss_type='exo_pair'\): needs a label smoothing above 0"),
        ({"loss_type": "discopop", "discopop_tau": 0}, r"dpo_loss\(discopop_tau=0\): needs a positive number"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, r"label_smoothing=0.5\): needs a number of at least 0 and b"),
        (
            {"loss_type": "apo_zero", "label_smoothing": 0.1},
            r"loss_type='apo_zero'\): only aot, aot_unpaired, exo_pair, robust, sigmoid take label smoothing",
        ),
        ({"loss_type": "apo_zer"}, r"loss_type='apo_zer'\): unknown; .*did you mean 'apo_zero'\?"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        dpo_loss(torch.zeros(2), torch.zeros(2), **options)


# --------------------------------------------------------------------------------------------------------------- TRL


def tokens_of_pairs(seed):
    generator = torch.Generator().manual_seed(seed)
    policy = -3 * torch.rand(8, 6, generator=generator, dtype=torch.float64)
    reference = policy + 0.5 * torch.randn(8, 6, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 7, (8,), generator=generator)
    return policy, reference, torch.arange(6) < lengths[:, None]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss[0]}-{loss[2]}")
@pytest.mark.parametrize("seed", [0, 1])
def test_each_type_and_its_gradient_are_trls(loss, seed):
    pytest.importorskip("trl", reason="trl is not there: pip install trl")
    loss_type, beta, smoothing = loss
    policy, reference, mask = tokens_of_pairs(seed)
    theirs, ours = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    expected = trl_trainers.dpo_loss(theirs, reference, mask, beta, loss_type, smoothing)
    sums = [masked_sum_log_probs(each, mask, average=loss_type in OF_MEANS).chunk(2) for each in (ours, reference)]
    found = dpo_loss(*sums[0], *sums[1], beta=beta, loss_type=loss_type, label_smoothing=smoothing)
    expected.backward()
    found.backward()
    # exo_pair is computed by TRL with its smoothing in float32
    tolerance = 1e-6 if loss_type == "exo_pair" else 1e-9
    assert_near(found.detach(), expected.detach(), tolerance)
    assert_near(ours.grad, theirs.grad, tolerance)


def test_these_are_all_types_that_trl_has():
    config = pytest.importorskip("trl.trainer.dpo_config", reason="trl is not there: pip install trl").DPOConfig
    named = set(re.findall(r"'(\w+)'", config.__dataclass_fields__["loss_type"].metadata["help"].replace("`", "")))
    assert {"sft", "aot"} < named
    for loss_type in named - {"sft"}:
        dpo_loss(torch.zeros(2), torch.zeros(2), loss_type=loss_type, label_smoothing=0.1 * (loss_type == "exo_pair"))
