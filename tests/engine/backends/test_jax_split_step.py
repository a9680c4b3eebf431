"""An update in JAX is one program, or several if a handler reads its gradients: the bits are the same."""

import itertools
from dataclasses import replace

import pytest

pytest.importorskip("jax", reason="pip install 'pulsetrain[jax]'")
pytest.importorskip("flax", reason="pip install 'pulsetrain[jax]'")

from tests.support.models import batches, bits, core_of, function_model, linen_model, nnx_model, torch_model
from tests.support.runs_backends import programs_kept

pytestmark = pytest.mark.slow

DECAY = 0.1


@pytest.fixture(scope="module", autouse=True)
def _programs_kept():
    with programs_kept():
        yield


def split_step(core, state, batch):
    """As a trainer does with a subscriber to GRADIENTS_READY."""
    backend = core.backend
    prepared = backend.prepare_batch(batch, core.strategy)
    found = backend.forward_backward(state, prepared, core.strategy)
    state = replace(state, weights={**state.weights, "buffers": found.buffers})
    found = backend.finish_gradients(state, backend.all_reduce_gradients(found))
    return backend.apply_gradients(state, found), found


CLIPPED = {"clip_grad_norm": 0.1, "clip_grad_value": 0.02}


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (function_model, {}),
        (function_model, CLIPPED),
        (lambda weights: nnx_model(weights, 0.3, norm=True), {}),
        (lambda weights: linen_model(weights, 0.3, norm=True), CLIPPED),
    ],
    ids=["function", "function, clipped", "nnx", "linen, clipped"],
)
def test_receivers_in_between_change_no_bit(make, settings):
    core = core_of(**settings)
    whole = parts = core.init(make(torch_model().state_dict()), "adamw", learning_rate=0.01, weight_decay=DECAY)
    for batch in batches(5):
        result = core.train_step(batch, whole)
        whole = result.state
        parts, found = split_step(core, parts, batch)
        assert bits(core.backend, [result.loss, result.metrics["grad_norm"]]) == bits(
            core.backend, [found.loss, found.grad_norm]
        )
        assert bits(core.backend, whole) == bits(core.backend, parts)
    assert whole.metadata == parts.metadata


@pytest.mark.parametrize("make", [nnx_model, linen_model], ids=["nnx", "linen"])
def test_dropout_draws_again_each_step_and_the_same_for_the_same_state(make):
    core = core_of()
    state = core.init(make(torch_model().state_dict(), 0.5), "sgd", learning_rate=1e-30)
    losses = []
    batch = batches(1)[0]
    for _ in range(3):
        losses.append(float(core.train_step(batch, state).loss))
        assert losses[-1] == float(core.train_step(batch, state).loss)
        state = core.train_step(batch, state).state
    assert len(set(losses)) == 3
    evaluated = [float(core.eval_step(batch, state)["loss"]) for _ in range(2)]
    assert evaluated[0] == evaluated[1]
    assert evaluated[0] not in losses


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_receivers_in_between_change_no_bit_of_long_sums(optimizer):
    import jax
    import numpy as np

    generator, sizes = np.random.default_rng(0), [4, 500, 300, 3]

    def model(layers, inputs):
        for layer in layers[:-1]:
            inputs = jax.nn.gelu(inputs @ layer["kernel"] + layer["bias"])
            inputs = (inputs - inputs.mean(-1, keepdims=True)) / (inputs.std(-1, keepdims=True) + 1e-5) * layer["scale"]
        return inputs @ layers[-1]["kernel"] + layers[-1]["bias"]

    def layer(before, after):
        kernel = generator.standard_normal((before, after), "float32") / before**0.5
        return {"kernel": kernel, "bias": np.zeros(after, "float32"), "scale": np.ones(after, "float32")}

    weights = [layer(before, after) for before, after in itertools.pairwise(sizes)]
    core = core_of(clip_grad_norm=0.1)
    whole = parts = core.init((model, weights), optimizer, learning_rate=0.01, weight_decay=DECAY)
    for batch in batches(5, rows=64):
        result = core.train_step(batch, whole)
        whole = result.state
        parts, found = split_step(core, parts, batch)
        assert float(result.metrics["grad_norm"]) == float(found.grad_norm)
        assert bits(core.backend, whole) == bits(core.backend, parts)
