"""The JAX backend reads whatever a loader gives, and says what it cannot do."""

import sys
from collections import namedtuple

import numpy as np
import pytest
import torch

from pulsetrain.engine import (
    ActivationOffload,
    ConfigurationError,
    JaxBackend,
    OptimizerOffload,
    PretrainStrategy,
    SupervisedStrategy,
)
from pulsetrain.engine.step.protocols import BackendSettings, TrainingBatch

pytest.importorskip("jax", reason="pip install 'pulsetrain[jax]'")
pytest.importorskip("flax", reason="pip install 'pulsetrain[jax]'")

import jax
import jax.numpy as jnp

from tests.support.models import batches, bits, core_of, function_model, linen_model, nnx_model, torch_model
from tests.support.runs_backends import programs_kept


@pytest.fixture(scope="module", autouse=True)
def _programs_kept():
    with programs_kept():
        yield


def test_a_function_gets_the_training_flag_and_a_key():
    def noisy(weights, inputs, key, train):
        return inputs @ weights["w"] + (jax.random.normal(key, (3,)) if train else 100.0)

    core = core_of(SupervisedStrategy("mse"))
    state = core.init((noisy, {"w": np.zeros((4, 3), "float32")}), "sgd", learning_rate=1e-30)
    batch = torch.zeros(2, 4), torch.zeros(2, 3)
    first = core.train_step(batch, state)
    assert 0 < float(first.loss) < 50
    assert float(core.train_step(batch, first.state).loss) != float(first.loss)
    assert float(core.eval_step(batch, state)["loss"]) == 10_000.0


# ------------------------------------------------------------------------------------------------------- batches

Pair = namedtuple("Pair", "inputs targets")
FORMS = {
    "torch": lambda inputs, targets: (inputs, targets),
    "numpy": lambda inputs, targets: (inputs.numpy(), targets.numpy()),
    "jax": lambda inputs, targets: (jnp.asarray(inputs.numpy()), jnp.asarray(targets.numpy())),
    "a list": lambda inputs, targets: [inputs, targets],
    "a named tuple": lambda inputs, targets: Pair(inputs, jnp.asarray(targets.numpy())),
    "int32": lambda inputs, targets: (inputs, targets.to(torch.int32)),
    "a strided view": lambda inputs, targets: (inputs.repeat(1, 2)[:, :4], targets.repeat_interleave(2)[::2]),
    "a TrainingBatch": lambda inputs, targets: TrainingBatch(inputs, targets, len(targets)),
    "read-only": lambda inputs, targets: (frozen(inputs.numpy()), frozen(targets.numpy())),
    "backwards": lambda inputs, targets: (inputs.numpy()[::-1].copy()[::-1], targets.numpy()),
}


def frozen(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_may_be_of_any_form(form):
    core = core_of()
    state = core.init(function_model(torch_model().state_dict()), "sgd", learning_rate=0.1)
    inputs, targets = batches(1)[0]
    expected = core.train_step((inputs, targets), state)
    found = core.train_step(FORMS[form](inputs, targets), state)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-6)
    assert float(core.eval_step(FORMS[form](inputs, targets), state)["loss"]) == pytest.approx(float(expected.loss))


@pytest.mark.parametrize("form", ["tuple", "mapping"])
def test_inputs_go_to_the_model_as_arguments_or_keywords(form):
    def model(weights, x, y=None):
        return (x + 2 * y) @ weights

    x, y = torch.randn(5, 4), torch.randn(5, 4)
    core = core_of(SupervisedStrategy("mse"))
    state = core.init((model, np.ones((4, 1), "float32")), "sgd")
    inputs = (x, y) if form == "tuple" else {"y": y.numpy(), "x": x}
    targets = (x + 2 * y).sum(1, keepdim=True)
    assert float(core.eval_step((inputs, targets), state)["loss"]) == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize("form", [torch.Tensor, dict, list])
def test_tokens_of_64_bits_are_accepted(form):
    """jax counts in 32."""
    tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
    assert tokens.dtype is torch.int64
    core = core_of(PretrainStrategy())
    table = torch.randn(11, 11, generator=torch.Generator().manual_seed(1))
    state = core.init((lambda weights, tokens: weights[tokens], table.numpy()), "sgd")
    batch = {torch.Tensor: tokens, dict: {"input_ids": tokens.numpy()}, list: [tokens]}[form]
    expected = torch.nn.functional.cross_entropy(table[tokens[:, :-1]].flatten(0, 1), tokens[:, 1:].flatten())
    assert float(core.train_step(batch, state).loss) == pytest.approx(expected.item(), abs=1e-6)


def test_labels_outside_the_classes_are_named_in_the_first_batch():
    core = core_of()
    state = core.init(function_model(torch_model().state_dict()), "sgd")
    inputs, targets = batches(1)[0]
    targets[2] = 3
    before = bits(core.backend, state)
    with pytest.raises(ValueError, match=r"cross_entropy\(targets\[2\]=3\): needs class indices from 0 to 2"):
        core.train_step((inputs, targets), state)
    with pytest.raises(ValueError, match=r"cross_entropy\(targets\[2\]=3\): needs class indices from 0 to 2"):
        core.eval_step((inputs, targets), state)
    assert bits(core.backend, state) == before


@pytest.mark.slow
def test_a_smaller_batch_compiles_a_new_program_and_weighs_correctly():
    core = core_of()
    state = core.init(function_model(torch_model().state_dict()), "sgd")
    inputs, targets = batches(1)[0]
    for rows in (16, 5, 16, 5):
        logits = torch_model()(inputs[:rows])
        expected = torch.nn.functional.cross_entropy(logits, targets[:rows])
        assert float(core.train_step((inputs[:rows], targets[:rows]), state).loss) == pytest.approx(expected.item())
    assert core.backend.compiled["train"] == 2


# ------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch_model(), r"model=Sequential: needs a flax nnx Module, a pair \(linen module, variables\), or a pair"),
        (lambda: None, "model=function: needs a"),
        ((1, 2, 3), r"model=\(int, int, int\): needs a"),
        (({"w": 1.0}, lambda weights: weights), r"model=\(dict, function\): needs a"),
        (
            (function_model, {"w": torch.ones(2)}),
            r"weights\['parameters/w'\] is a torch tensor; pass jax.numpy.from_dlpa",
        ),
    ],
    ids=["torch", "function alone", "three", "turned round", "weights of torch"],
)
def test_models_of_another_kind_are_refused(model, message):
    with pytest.raises(TypeError, match=f"JaxBackend: {message}"):
        core_of().init(model, "sgd")


@pytest.mark.slow
def test_a_linen_module_needs_its_variables():
    module, variables = linen_model(torch_model().state_dict())
    with pytest.raises(TypeError, match=r"variables=dict of Net: needs a mapping with 'params', as module.init"):
        core_of().init((module, variables["params"]), "sgd")


@pytest.mark.parametrize("device", ["tpu", "cuda:7", "cpu:3", "cpu:x", "nowhere"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ConfigurationError, match=rf"device='{device}': jax finds no such device here; it has cpu:0"):
        JaxBackend(device)
    with pytest.raises(ConfigurationError, match=rf"device='{device}': jax finds no such device here"):
        JaxBackend().configure(BackendSettings(device=device))


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        (
            {"precision": "bf16"},
            r"precision='bf16'\): JaxBackend computes in the precision of the weights and the model",
        ),
        ({"precision": "fp16"}, r"precision='fp16'\): JaxBackend computes in the precision"),
        ({"compile": True}, r"compile=True\): not with JaxBackend; leave it out"),
        ({"activation_offload": ActivationOffload()}, r"activation_offload=.*: not with JaxBackend; leave it out"),
        ({"optimizer_offload": OptimizerOffload()}, r"optimizer_offload=.*: not with JaxBackend; leave it out"),
        ({"activation_checkpointing": "a"}, r"activation_checkpointing='a'\): not with JaxBackend; leave it out"),
    ],
    ids=str,
)
def test_settings_of_torch_are_refused(setting, parts):
    with pytest.raises(ConfigurationError, match=parts):
        core_of(**setting)


def test_an_error_of_the_model_says_what_it_was_given():
    core = core_of()
    state = core.init(function_model(torch_model().state_dict()), "sgd")
    with pytest.raises(TypeError) as error:
        core.train_step((torch.ones(2, 5), torch.zeros(2, dtype=torch.int64)), state)
    assert any("given inputs float32 (2, 5), targets int32 (2,) from 0 to 0" in note for note in error.value.__notes__)


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_without_the_package_the_extra_is_named(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigurationError, match=r"JaxBackend: needs a package that is not there .*pulsetrain\[jax\]"):
        JaxBackend()


@pytest.mark.slow
def test_without_flax_a_function_trains_and_a_module_is_refused(monkeypatch):
    module = nnx_model(torch_model().state_dict())
    monkeypatch.setitem(sys.modules, "flax", None)
    core = core_of()
    state = core.init(function_model(torch_model().state_dict()), "sgd")
    assert core.train_step(batches(1)[0], state).state.metadata["step"] == 1
    with pytest.raises(TypeError, match="model=Net: needs a flax nnx Module"):
        core.init(module, "sgd")


# ------------------------------------------------------------------------------------------- what a program is given


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.int64, "int32"),
        (torch.float64, "float32"),
        (torch.float16, "float16"),
        (torch.bool, "bool"),
        (torch.uint8, "uint8"),
        (torch.bfloat16, "bfloat16"),  # which numpy lacks
        (torch.complex128, "complex64"),
    ],
)
def test_an_argument_has_the_dtype_of_a_jax_array(dtype, expected):
    backend, tensor = JaxBackend("cpu"), torch.tensor([[1, 2], [3, 4]]).to(dtype).T
    found = backend.to_arguments({"nested": [tensor, 7]})
    assert found["nested"][1] == 7
    assert str(found["nested"][0].dtype) == expected == str(backend.from_torch(tensor).dtype)
    assert jnp.array_equal(jnp.asarray(found["nested"][0]), backend.from_torch(tensor))


def test_a_loader_may_reuse_the_memory_of_a_batch():
    backend, inputs = JaxBackend("cpu"), torch.zeros(2, 4)
    prepared = backend.prepare_batch((inputs, torch.zeros(2, dtype=torch.int32)), SupervisedStrategy())
    inputs.fill_(1.0)
    assert not np.asarray(prepared.inputs).any()


def test_an_update_that_the_host_skips_runs_no_program():
    core = core_of()
    state = core.init(function_model(torch_model().state_dict()), "adamw", learning_rate=0.01)
    backend = core.backend
    prepared = backend.prepare_batch(batches(1)[0], core.strategy)
    found = backend.finish_gradients(state, backend.forward_backward(state, prepared, core.strategy))
    skipped = backend.apply_gradients(state, found, torch.tensor(True), donate=True)
    assert backend.compiled["apply"] == 0
    assert bits(backend, skipped) == bits(backend, state)
    assert (skipped.metadata["step"], skipped.metadata["learning_rate"]) == (1, 0.01)
    guarded = backend.apply_gradients(state, found, torch.tensor(False))
    assert bits(backend, guarded) == bits(backend, backend.apply_gradients(state, found))
    assert backend.compiled["apply"] == 1


def test_checking_a_first_batch_traces_the_model_once_for_each_shape():
    traced = []

    def model(weights, inputs):
        traced.append(inputs.shape)
        return inputs @ weights["w"]

    core = core_of(SupervisedStrategy("mse"))
    state = core.init((model, {"w": np.zeros((4, 3), "float32")}), "sgd", learning_rate=0.1)
    batch = torch.zeros(2, 4), torch.zeros(2, 3)
    core.eval_step(batch, state)  # for the check, and for the program
    first = len(traced)
    for _ in range(3):  # each is checked, as the first batch of each validation is
        core.eval_step(batch, state)
    assert len(traced) == first
    core.eval_step((torch.zeros(5, 4), torch.zeros(5, 3)), state)
    assert len(traced) == 2 * first
