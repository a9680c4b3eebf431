"""Distributions of actions, beside torch.distributions and formulas in NumPy."""

import math

import numpy
import pytest
import torch
from torch import distributions

from pulsetrain.engine.strategies.distributions import Categorical, Gaussian, MultiCategorical, SquashedGaussian
from tests.support import formulas
from tests.support.formulas import RUNS, assert_near, value_and_gradients
from tests.support.models_language import refusal

ROWS, SIZE, COUNTS = 5, 3, (2, 4, 3)


def normal_of(seed, dtype="float64"):
    """Means and logarithms of standard deviations, and actions."""
    generator = numpy.random.default_rng(seed)
    parameters = generator.normal(size=(ROWS, 2 * SIZE))
    parameters[:, SIZE:] *= 0.3
    return parameters.astype(dtype), (1.5 * generator.normal(size=(ROWS, SIZE))).astype(dtype)


def choices_of(seed, dtype="float64"):
    """Logits of each choice, and choices."""
    generator = numpy.random.default_rng(seed)
    actions = numpy.stack([generator.integers(count, size=ROWS) for count in COUNTS], -1)
    return generator.normal(size=(ROWS, sum(COUNTS))).astype(dtype), actions


def log_density(parameters, actions):
    mean, log_std = numpy.split(numpy.asarray(parameters, "float64"), 2, -1)
    apart = (numpy.asarray(actions, "float64") - mean) / numpy.exp(log_std)
    return (-0.5 * apart**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def log_density_of_tangents(parameters, actions):
    return log_density(parameters, actions) - numpy.log(1 - numpy.tanh(numpy.asarray(actions, "float64")) ** 2).sum(-1)


def log_choice(parameters, actions):
    parts = numpy.split(parameters, numpy.cumsum(COUNTS)[:-1], -1)
    return sum(formulas.log_probs_of(each, actions[:, number]) for number, each in enumerate(parts))


LOG_PROBS = [
    (Gaussian(SIZE), log_density, normal_of),
    (SquashedGaussian(SIZE), log_density_of_tangents, normal_of),
    (MultiCategorical(COUNTS), log_choice, choices_of),
]


@pytest.mark.parametrize(("library", "dtype"), RUNS)
@pytest.mark.parametrize(("distribution", "formula", "make"), LOG_PROBS, ids=["gaussian", "squashed", "several"])
def test_log_probabilities_and_gradients_are_those_of_the_formula(distribution, formula, make, library, dtype):
    parameters, actions = make(0, dtype)
    value, (gradient,) = value_and_gradients(library, distribution.log_probs, parameters, actions)
    assert value.shape == (ROWS,)
    assert_near(value, formula(parameters, actions))
    assert_near(gradient, formulas.differences(formula, parameters, actions), 2e-6)


def test_log_probabilities_and_entropies_are_those_of_torch_distributions():
    parameters, actions = map(torch.from_numpy, normal_of(1))
    normal = distributions.Independent(distributions.Normal(parameters[:, :SIZE], parameters[:, SIZE:].exp()), 1)
    assert_near(Gaussian(SIZE).log_probs(parameters, actions), normal.log_prob(actions), 1e-12)
    assert_near(Gaussian(SIZE).entropy(parameters), normal.entropy(), 1e-12)
    squashed = distributions.TransformedDistribution(normal, [distributions.TanhTransform(cache_size=1)])
    found = SquashedGaussian(SIZE).log_probs(parameters, actions)
    assert_near(found, squashed.log_prob(torch.tanh(actions)), 1e-9)
    parameters, actions = map(torch.from_numpy, choices_of(1))
    parts = [distributions.Categorical(logits=each) for each in parameters.split(COUNTS, -1)]
    found = MultiCategorical(COUNTS).log_probs(parameters, actions)
    assert_near(found, sum(each.log_prob(actions[:, number]) for number, each in enumerate(parts)), 1e-12)
    assert_near(MultiCategorical(COUNTS).entropy(parameters), sum(each.entropy() for each in parts), 1e-12)


@pytest.mark.parametrize("deviation", [0.1, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("mean", [0.0, 0.7, -3.0])
def test_the_entropy_of_a_squashed_distribution_is_its_integral(mean, deviation):
    points = numpy.linspace(mean - 12 * deviation, mean + 12 * deviation, 200_001)
    density = numpy.exp(-0.5 * ((points - mean) / deviation) ** 2) / (deviation * math.sqrt(2 * math.pi))
    slope = 2 * (math.log(2) - points - numpy.logaddexp(0, -2 * points))  # the logarithm of 1 - tanh(x) ** 2
    expected = numpy.trapezoid(density * (slope - numpy.log(density + 1e-300)), points)
    parameters = torch.tensor([[mean, math.log(deviation)]], dtype=torch.float64)
    found = SquashedGaussian(1).entropy(parameters).item()
    assert found == pytest.approx(expected, abs=1e-7 if deviation <= 1 else 2e-4)


def test_an_entropy_has_a_gradient_on_jax_too():
    pytest.importorskip("jax", reason="jax is not there: pip install 'pulsetrain[jax]'")
    parameters, _ = normal_of(2, "float32")
    for distribution in (Gaussian(SIZE), SquashedGaussian(SIZE)):
        by_jax = value_and_gradients("jax", distribution.entropy, parameters)
        by_torch = value_and_gradients("torch", distribution.entropy, parameters)
        assert_near(by_jax[0], by_torch[0], 2e-6)
        assert_near(by_jax[1][0], by_torch[1][0], 2e-6)
        assert abs(by_torch[1][0][:, SIZE:]).min() > 0.01


@pytest.mark.parametrize("kind", [Gaussian, SquashedGaussian])
def test_samples_have_the_means_and_deviations_of_the_parameters(kind):
    count = 20_000
    torch.manual_seed(0)
    parameters = torch.tensor([1.0, -2.0, math.log(0.5), math.log(3.0)]).expand(count, 4)
    drawn = kind(2).sample(parameters)
    assert drawn.mean(0).tolist() == pytest.approx([1.0, -2.0], abs=5 * 3.0 / math.sqrt(count))
    assert drawn.std(0).tolist() == pytest.approx([0.5, 3.0], rel=0.05)
    torch.manual_seed(0)
    assert torch.equal(kind(2).sample(parameters), drawn)
    assert kind(2).mode(parameters[:1]).tolist() == [[1.0, -2.0]]


def test_samples_of_choices_are_as_frequent_as_the_logits_say():
    count = 20_000
    torch.manual_seed(0)
    shares = [[0.2, 0.8], [0.1, 0.6, 0.3]]
    logits = torch.tensor([math.log(each) for part in shares for each in part]).expand(count, 5)
    drawn = MultiCategorical((2, 3)).sample(logits)
    assert drawn.shape == (count, 2)
    for number, part in enumerate(shares):
        found = torch.bincount(drawn[:, number], minlength=len(part)) / count
        assert found.tolist() == pytest.approx(part, abs=5 * 0.5 / math.sqrt(count))
    assert MultiCategorical((2, 3)).mode(logits[:1]).tolist() == [[1, 1]]
    assert Categorical(5).mode(logits[:1]).tolist() == [1]


WRONG = [
    (lambda: Gaussian(3).entropy(torch.zeros(2, 3)), "Gaussian(parameters of shape (2, 3)): needs 6 numbers for each"),
    (lambda: SquashedGaussian(1).entropy(torch.zeros(2, 3)), "SquashedGaussian(parameters of shape (2, 3)): needs 2"),
    (lambda: MultiCategorical((2, 3)).entropy(torch.zeros(2, 3)), "MultiCategorical(parameters of shape (2, 3)): ne"),
    (
        lambda: Gaussian(1).log_probs(torch.zeros(2, 2), torch.zeros(2)),
        "Gaussian.log_probs(parameters of shape (2, 2), actions of shape (2,)): needs 1 numbers for each row",
    ),
    (
        lambda: MultiCategorical((2, 3)).log_probs(torch.zeros(2, 5), torch.zeros(2, 3, dtype=torch.int64)),
        "MultiCategorical.log_probs(parameters of shape (2, 5), actions of shape (2, 3)): needs 2 actions",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_shapes_that_do_not_fit_are_refused(call, message):
    assert refusal(call, ValueError).startswith(message)
