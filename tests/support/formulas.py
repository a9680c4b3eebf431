"""Gradients by differentiation and by finite differences, and reference formulas in NumPy."""

import functools

import numpy
import pytest
import torch

from pulsetrain.engine.step.protocols import TrainingBatch
from tests.support.losses import converted, needs_jax

RUNS = [
    pytest.param("torch", "float32", id="torch-float32"),
    pytest.param("torch", "float64", id="torch-float64"),
    pytest.param("jax", "float32", id="jax-float32", marks=needs_jax),
]
"""Libraries that have gradients, and dtypes; of jax's float64 `runs` has a case of each loss."""


def runs(cases, by_jax):
    """Parameters of a test: a library, a dtype, then those of a case.

    Args:
        cases: by torch, in both dtypes.
        by_jax: in float32, the first in float64 too. Few: a program is compiled for each, in a quarter of a second.
    """
    return [
        *(pytest.param("torch", dtype, *case) for dtype in ("float32", "float64") for case in cases),
        *(pytest.param("jax", "float32", *case, marks=needs_jax) for case in by_jax),
        pytest.param("jax", "float64", *by_jax[0], marks=needs_jax),
    ]


def arrays_of(library, *arrays):
    """Converts NumPy arrays to the library's; other values stay unchanged."""
    given = [each for each in arrays if isinstance(each, (numpy.ndarray, numpy.generic))]
    tensors = [torch.from_numpy(numpy.array(each)) for each in given]
    made = iter(tensors if library == "torch" else converted(library, *tensors))
    return [next(made) if isinstance(each, (numpy.ndarray, numpy.generic)) else each for each in arrays]


def rounded(dtype, *arrays):
    """The arrays rounded to that dtype."""
    return [numpy.asarray(each, dtype) for each in arrays]


def value_and_gradients(library, function, *arrays, wrt=(0,)):
    """The function's value, and the gradients of its sum, as NumPy arrays; in jax inside `jit`."""
    if library == "torch":
        tensors = arrays_of("torch", *arrays)
        for index in wrt:
            tensors[index].requires_grad_()
        value = function(*tensors)
        if not value.requires_grad:
            return value.numpy(), [numpy.zeros(arrays[index].shape) for index in wrt]
        gradients = torch.autograd.grad(value.sum(), [tensors[index] for index in wrt], materialize_grads=True)
        return value.detach().numpy(), [gradient.numpy() for gradient in gradients]
    import jax

    with jax.enable_x64(any(getattr(each, "dtype", None) == "float64" for each in arrays)):
        given, fixed = arrays_of("jax", *arrays), [index for index, each in enumerate(arrays) if each is None]
        (_, value), gradients = _jitted(function, tuple(wrt), tuple(fixed))(*given)
    return numpy.asarray(value), [numpy.asarray(gradient) for gradient in gradients]


@functools.lru_cache(maxsize=8)
def _jitted(function, wrt, fixed):
    """Cached, so that arrays of the same shapes use the compiled program."""
    import jax

    def total(*given):
        value = function(*given)
        return value.sum(), value

    return jax.jit(jax.value_and_grad(total, argnums=wrt, has_aux=True), static_argnums=fixed)


def differences(formula, *arrays, wrt=0, step=1e-6):
    """The gradient of the sum of a formula in one of its arrays, by central differences in float64."""
    gradient = numpy.zeros(arrays[wrt].shape)
    for index in numpy.ndindex(*arrays[wrt].shape):
        sides = []
        for sign in (1, -1):
            moved = [numpy.array(each, "float64") if each is arrays[wrt] else each for each in arrays]
            moved[wrt][index] += sign * step
            sides.append(numpy.sum(formula(*moved)))
        gradient[index] = (sides[0] - sides[1]) / (2 * step)
    return gradient


def assert_near(found, expected, tolerance=1e-6):
    """Within the tolerance relative to the largest expected value, at least 1."""
    expected = numpy.asarray(expected)
    largest = max(1.0, float(abs(expected).max(initial=0.0)))
    numpy.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * largest)


# ---------------------------------------------------------------------------------------- strategies and their formulas


STRATEGY_RUNS = [
    pytest.param("torch", "float64", id="torch-float64"),
    pytest.param("jax", "float32", id="jax-float32", marks=needs_jax),
]
"""The losses' own tests have the other two."""

ROWS, LENGTH, VOCABULARY = 3, 6, 5
IGNORED = -100


def tokens_of(seed, rows=ROWS, length=LENGTH):
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits_of(seed, dtype="float64", rows=ROWS, length=LENGTH):
    """Logits of all positions but the last."""
    generator = numpy.random.default_rng(seed)
    return (2 * generator.standard_normal((rows, length - 1, VOCABULARY))).astype(dtype)


def answers_of(seed, rows=ROWS, length=LENGTH):
    """The mask of each row's answer: after a prompt and before padding; no two rows alike."""
    mask = torch.zeros(rows, length, dtype=torch.bool)
    for row in range(rows):
        first = 1 + (row + seed) % 3
        mask[row, first : min(length, first + 2 + row)] = True
    return mask


def labelled(seed, rows=ROWS, length=LENGTH):
    tokens = tokens_of(seed, rows, length)
    return {"input_ids": tokens, "labels": torch.where(answers_of(seed, rows, length), tokens, IGNORED)}


def log_softmax(logits):
    logits = numpy.asarray(logits, "float64")
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - numpy.log(numpy.exp(shifted).sum(-1, keepdims=True))


def log_probs_of(logits, tokens):
    """Log-probabilities of the tokens that follow each position."""
    tokens = numpy.asarray(tokens)
    return numpy.take_along_axis(log_softmax(logits), tokens[..., None], -1)[..., 0]


def cross_entropy(logits, labels, *, z_loss=0.0, label_smoothing=0.0):
    """The mean over labels that are not ignored; the logits are those of the positions before them."""
    losses = []
    for place in numpy.ndindex(*numpy.asarray(labels).shape):
        label = int(labels[place])
        if label == IGNORED:
            continue
        row = numpy.asarray(logits[place], "float64")
        log_sum = numpy.log(numpy.exp(row).sum())
        spread = label_smoothing * (log_sum - row).mean()
        losses.append((1 - label_smoothing) * (log_sum - row[label]) + spread + z_loss * log_sum**2)
    return sum(losses) / len(losses)


def entropies(logits):
    log_probs = log_softmax(logits)
    return -(numpy.exp(log_probs) * log_probs).sum(-1)


def surrogate(log_probs, old, advantages, low, high):
    ratio = numpy.exp(log_probs - old)
    return numpy.maximum(-advantages * ratio, -advantages * numpy.clip(ratio, 1 - low, 1 + high))


def kl_k3(policy, other):
    """KL(policy || other) of samples of the policy."""
    return numpy.exp(other - policy) - 1 - (other - policy)


def gae_by_loop(rewards, values, dones, gamma, lam):
    """For one environment: lists over time, the values with one more entry."""
    advantages, following = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        alive = 0.0 if dones[t] else 1.0
        delta = rewards[t] + gamma * alive * values[t + 1] - values[t]
        following = advantages[t] = delta + gamma * lam * alive * following
    return advantages


def found_by(strategy, batch, library, *outputs):
    """The strategy's loss and metrics of these outputs as a library computes them, and the loss's gradients in them."""
    prepared = strategy.prepare_batch(batch)
    named = prepared.targets if isinstance(prepared.targets, dict) else {"": prepared.targets}
    targets = [value.numpy() for value in named.values()]

    def batch_of(arrays):
        found = dict(zip(named, arrays, strict=True))
        return TrainingBatch(None, found.get("", found), prepared.samples, prepared.tokens, prepared.weight)

    def loss(*arrays):
        given = arrays[: len(outputs)]
        return strategy.compute_loss(given[0] if len(given) == 1 else given, batch_of(arrays[len(outputs) :]))

    value, gradients = value_and_gradients(library, loss, *outputs, *targets, wrt=range(len(outputs)))
    arrays = arrays_of(library, *outputs, *targets)
    given = arrays[: len(outputs)]
    metrics = strategy.compute_metrics(given[0] if len(given) == 1 else given, batch_of(arrays[len(outputs) :]))
    return value, gradients, {name: float(value) for name, value in metrics.items()}


def assert_is(formula, strategy, batch, library, *outputs):
    """Asserts that the strategy's loss and gradients equal the formula's; returns its metrics."""
    value, gradients, metrics = found_by(strategy, batch, library, *outputs)
    assert value.shape == ()
    assert_near(value, formula(*outputs))
    for number, gradient in enumerate(gradients):
        assert_near(gradient, differences(formula, *outputs, wrt=number))
    return metrics
