"""SimPO, ORPO, KTO and the loss of reward models: formulas by loops, gradients by differences, and TRL's own losses."""

import math
from types import SimpleNamespace

import numpy
import pytest
import torch

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import bradley_terry_loss, kto_loss, orpo_loss, simpo_loss
from tests.support import trl_trainers
from tests.support.formulas import RUNS, arrays_of, assert_near, differences, rounded, runs, value_and_gradients
from tests.support.losses import LIBRARIES

EVERY = ["torch", *LIBRARIES]


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def means_of(size, seed, dtype="float64"):
    """Mean log-probabilities of the tokens of two replies to each prompt."""
    return rounded(dtype, *(-3 * numpy.random.default_rng(seed).random((2, size)) - 1e-3))


def simpo_by_loop(chosen, rejected, beta, gamma, e):
    x = [beta * (float(c) - float(r)) - gamma for c, r in zip(chosen, rejected, strict=True)]
    return sum(-(1 - e) * log_sigmoid(each) - e * log_sigmoid(-each) for each in x) / len(x)


def orpo_by_loop(chosen, rejected):
    odds = [[math.exp(float(x)) / -math.expm1(float(x)) for x in side] for side in (chosen, rejected)]
    return sum(-log_sigmoid(math.log(one / other)) for one, other in zip(*odds, strict=True)) / len(chosen)


def bradley_terry_by_loop(chosen, rejected, margin, center):
    losses = []
    for number, (one, other) in enumerate(zip(chosen, rejected, strict=True)):
        difference = float(one) - float(other) - (0.0 if margin is None else float(margin[number]))
        losses.append(-log_sigmoid(difference) + center * (float(one) + float(other)) ** 2)
    return sum(losses) / len(losses)


def kto_by_loop(policy, reference, desirable, kl, beta, weights):
    losses = []
    for p, r, good in zip(policy, reference, desirable, strict=True):
        reward = beta * (float(p) - float(r) - (0.0 if kl is None else float(kl)))
        losses.append(weights[0] * (1 - 1 / (1 + math.exp(-reward))) if good else weights[1] / (1 + math.exp(-reward)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("library", "dtype", "beta", "gamma", "smoothing"),
    runs([(2.0, 1.0, 0.0), (2.5, 0.0, 0.2)], by_jax=[(2.5, 0.5, 0.2)]),
)
def test_simpo_and_its_gradients_match_the_formula(library, dtype, beta, gamma, smoothing):
    options = beta, gamma, smoothing
    arrays = means_of(6, 0, dtype)
    value, gradients = value_and_gradients(library, lambda *given: simpo_loss(*given, *options), *arrays, wrt=(0, 1))
    assert (value.shape, value.dtype) == ((), dtype)
    assert_near(value, simpo_by_loop(*arrays, *options))
    for index in (0, 1):
        assert_near(gradients[index], differences(lambda *g: simpo_by_loop(*g, *options), *arrays, wrt=index))


@pytest.mark.parametrize(("library", "dtype"), RUNS)
def test_orpo_and_its_gradients_match_the_formula(library, dtype):
    arrays = means_of(6, 1, dtype)
    value, gradients = value_and_gradients(library, orpo_loss, *arrays, wrt=(0, 1))
    assert (value.shape, value.dtype) == ((), dtype)
    assert_near(value, orpo_by_loop(*arrays))
    for index in (0, 1):
        assert_near(gradients[index], differences(orpo_by_loop, *arrays, wrt=index))


@pytest.mark.parametrize(("library", "dtype"), RUNS)
def test_odds_are_exact_near_a_certain_reply_and_far_from_it(library, dtype):
    # log(odds) of 1 - 1e-5 and of exp(-60), each beside even odds
    chosen, rejected = rounded(dtype, [-1e-5, -60.0], [-math.log(2)] * 2)
    value, _ = value_and_gradients(library, orpo_loss, chosen, rejected)
    assert_near(value, orpo_by_loop(chosen, rejected), 1e-6)


@pytest.mark.parametrize(("library", "dtype"), RUNS)
@pytest.mark.parametrize("pair", [(0.0, 0.0), (0.0, -1.0), (-1.0, 0.0)])
def test_a_certain_or_empty_reply_has_finite_odds_and_no_gradient(library, dtype, pair):
    arrays = rounded(dtype, [pair[0]], [pair[1]])
    value, gradients = value_and_gradients(library, orpo_loss, *arrays, wrt=(0, 1))
    assert numpy.isfinite(value)
    assert numpy.isfinite(gradients).all()
    if pair == (0.0, 0.0):
        assert_near(value, math.log(2))


@pytest.mark.parametrize(
    ("library", "dtype", "with_margin", "center"),
    runs([(False, 0.0), (True, 0.0), (True, 0.1)], by_jax=[(True, 0.1), (False, 0.0)]),
)
def test_the_loss_of_rewards_and_its_gradients_match_the_formula(library, dtype, with_margin, center):
    generator = numpy.random.default_rng(2)
    arrays = rounded(dtype, *generator.standard_normal((3, 6)))
    arrays[2] = arrays[2] if with_margin else None

    def loss(chosen, rejected, margin):
        return bradley_terry_loss(chosen, rejected, margin, center)

    value, gradients = value_and_gradients(library, loss, *arrays, wrt=(0, 1))
    assert (value.shape, value.dtype) == ((), dtype)
    assert_near(value, bradley_terry_by_loop(*arrays, center))
    for index in (0, 1):
        expected = differences(lambda *given: bradley_terry_by_loop(*given, center), *arrays, wrt=index)
        assert_near(gradients[index], expected)
    if with_margin:
        _, (gradient,) = value_and_gradients(library, loss, *arrays, wrt=(2,))
        assert not gradient.any()


@pytest.mark.parametrize(
    ("library", "dtype", "kl", "weights"),
    runs([(None, (1.0, 1.0)), (0.7, (1.0, 2.0)), (0.0, (0.5, 1.0))], by_jax=[(0.7, (1.0, 2.0)), (None, (1.0, 1.0))]),
)
def test_kto_and_its_gradient_match_the_formula(library, dtype, kl, weights):
    generator = numpy.random.default_rng(3)
    policy, reference = rounded(dtype, *(-5 * generator.random((2, 7))))
    desirable = generator.random(7) < 0.5
    assert 0 < desirable.sum() < 7
    arrays = [policy, reference, desirable, None if kl is None else numpy.asarray(kl, dtype)]

    def loss(*given):
        return kto_loss(*given, 0.4, *weights)

    def formula(*given):
        return kto_by_loop(*given, 0.4, weights)

    value, (gradient,) = value_and_gradients(library, loss, *arrays)
    assert (value.shape, value.dtype) == ((), dtype)
    assert_near(value, formula(*arrays))
    assert_near(gradient, differences(formula, *arrays))
    fixed = (1,) if kl is None else (1, 3)
    _, gradients = value_and_gradients(library, loss, *arrays, wrt=fixed)
    assert not any(numpy.any(each) for each in gradients)


@pytest.mark.parametrize("library", EVERY)
def test_what_does_not_fit_is_refused(library):
    two, three, rows, whole = arrays_of(
        library, numpy.zeros(2), numpy.zeros(3), numpy.zeros((2, 3)), numpy.zeros(2, "int32")
    )
    for loss in (simpo_loss, orpo_loss, bradley_terry_loss):
        with pytest.raises(ValueError, match=r"of shape \(2,\), .* of shape \(3,\)\): needs equal shapes"):
            loss(two, three)
        with pytest.raises(ValueError, match=r"\(2, 3\)\): needs a number for each reply"):
            loss(rows, rows)
    with pytest.raises(ValueError, match=r"margin of shape \(3,\)\): needs equal shapes"):
        bradley_terry_loss(two, two, three)
    with pytest.raises(TypeError, match=r"kto_loss\(desirable of int32\): needs booleans; pass desirable != 0"):
        kto_loss(two, two, whole)
    with pytest.raises(ValueError, match=r"kto_loss\(kl of shape \(2,\)\): needs one number"):
        kto_loss(two, two, whole != 0, two)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: simpo_loss(x, x, beta=0), r"simpo_loss\(beta=0\): needs a positive number"),
        (lambda x: simpo_loss(x, x, gamma=-1), r"simpo_loss\(gamma=-1\): needs a finite number of at least 0"),
        (lambda x: simpo_loss(x, x, label_smoothing=0.5), r"label_smoothing=0.5\): needs a number of at least 0"),
        (lambda x: bradley_terry_loss(x, x, None, -0.1), r"center_coef=-0.1\): needs a finite number of at least 0"),
        (lambda x: kto_loss(x, x, x == 0, beta=-1), r"kto_loss\(beta=-1\): needs a positive number"),
        (lambda x: kto_loss(x, x, x == 0, desirable_weight=0), r"desirable_weight=0\): needs a positive number"),
    ],
)
def test_impossible_options_are_refused(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call(torch.zeros(2))


# --------------------------------------------------------------------------------------------------------------- TRL


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo_is_trls(smoothing):
    trainer_class = trl_trainers.experimental("cpo").CPOTrainer
    chosen, rejected = map(torch.from_numpy, means_of(5, 4))
    trainer = SimpleNamespace(
        alpha=0.0, beta=2.0, simpo_gamma=1.3, loss_type="simpo", label_smoothing=smoothing,
        accelerator=trl_trainers.OneProcess(),
    )  # fmt: skip
    losses, rewards, _ = trainer_class.cpo_loss(trainer, chosen, rejected)
    assert_near(simpo_loss(chosen, rejected, 2.0, 1.3, smoothing), losses.mean(), 1e-9)
    assert_near(rewards, 2.0 * chosen)


def test_orpo_is_trls():
    trainer_class = trl_trainers.experimental("orpo").ORPOTrainer
    chosen, rejected = (torch.from_numpy(each) for each in means_of(5, 5, "float32"))
    trainer = SimpleNamespace(beta=1.0, accelerator=trl_trainers.OneProcess())
    losses, *_ = trainer_class.odds_ratio_loss(trainer, chosen, rejected)
    assert_near(orpo_loss(chosen, rejected), -losses.mean())


@pytest.mark.parametrize("center", [None, 0.05])
@pytest.mark.parametrize("with_margin", [False, True])
def test_the_loss_of_rewards_is_trls(center, with_margin):
    pytest.importorskip("trl", reason="trl is not there: pip install trl")
    from trl.trainer.reward_trainer import RewardTrainer

    rewards = torch.randn(8, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    margin = torch.rand(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) if with_margin else None
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), args=SimpleNamespace(center_rewards_coefficient=center),
        accelerator=trl_trainers.OneProcess(), _metrics=trl_trainers.metrics(), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {"attention_mask": torch.ones(8, 3)} | ({"margin": margin} if with_margin else {})
    theirs = RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=rewards), inputs)
    found = bradley_terry_loss(*rewards.squeeze(-1).chunk(2), margin, center or 0.0)
    assert_near(found, theirs, 1e-12)
