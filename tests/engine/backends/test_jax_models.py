"""Models on the JAX backend: random numbers, the training flag, and updates of the user's object."""

import numpy as np
import pytest
import torch
from torch import nn

from pulsetrain import Loop, Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError, JaxBackend, SupervisedStrategy
from pulsetrain.engine.optimizers import create_optimizer

pytest.importorskip("jax", reason="pip install 'pulsetrain[jax]'")
pytest.importorskip("flax", reason="pip install 'pulsetrain[jax]'")

import jax
import jax.numpy as jnp
from flax import linen

from tests.support.models import batches, bits, core_of, function_model, linen_model, nnx_model, torch_model
from tests.support.runs_backends import programs_kept


@pytest.fixture(scope="module", autouse=True)
def _programs_kept():
    with programs_kept():
        yield


def dropping(weights, inputs, train, key):
    """A layer after dropout."""
    if train:
        inputs = inputs * jax.random.bernoulli(key, 0.5, inputs.shape)
    return inputs @ weights


# -------------------------------------------------------------------------------------------- what is drawn, and when


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        lambda: (dropping, np.eye(4, 3, dtype="float32")),
        lambda: linen_model(torch_model().state_dict(), dropout=0.5),
    ],
    ids=["function", "linen"],
)
def test_each_batch_of_an_update_has_a_mask_of_its_own(model):
    core = core_of()
    state = core.init(model(), "sgd")
    prepared = core.backend.prepare_batch(batches(1)[0], core.strategy)
    found, losses = None, []
    for count in (1, 2, 3):
        found = core.backend.forward_backward(state, prepared, core.strategy, 1.0, found)
        assert found.batches == count
        losses.append(float(found.loss))
    assert len(set(losses)) == 3
    assert float(core.backend.forward_backward(state, prepared, core.strategy).loss) == losses[0]


class Deterministic(linen.Module):
    """Takes the flag `deterministic`."""

    @linen.compact
    def __call__(self, inputs, deterministic):
        return linen.Dense(3)(linen.Dropout(0.5, deterministic=deterministic)(inputs))


@pytest.mark.slow
def test_a_linen_module_with_deterministic_draws_only_in_training():
    core, (inputs, targets) = core_of(), batches(1)[0]
    module = Deterministic()
    variables = module.init(jax.random.key(0), jnp.zeros((1, 4)), deterministic=True)
    state = core.init((module, variables), "sgd", learning_rate=1e-30)
    outputs = module.apply(variables, inputs.numpy(), deterministic=True)
    expected = float(nn.functional.cross_entropy(torch.from_dlpack(outputs), targets))
    assert float(core.eval_step((inputs, targets), state)["loss"]) == pytest.approx(expected, rel=1e-6)
    drawn = []
    for _ in range(3):
        result = core.train_step((inputs, targets), state)
        drawn.append(float(result.loss))
        state = result.state
    assert len({*drawn, expected}) == 4


@pytest.mark.slow
def test_steps_are_computed_with_the_model_that_was_given_last():
    core, batch = core_of(SupervisedStrategy("mse")), (torch.ones(2, 4), torch.zeros(2, 3))
    weights = np.eye(4, 3, dtype="float32")
    losses = []
    for factor in (1.0, 2.0):
        state = core.init((lambda weights, inputs, factor=factor: factor * inputs @ weights, weights), "sgd")
        found = core.backend.forward_backward(state, core.backend.prepare_batch(batch, core.strategy), core.strategy)
        step, evaluated = core.train_step(batch, state), core.eval_step(batch, state)
        called = core.backend.outputs(state.weights, (batch[0],))
        losses.append([float(found.loss), float(step.loss), float(evaluated["loss"]), float(called[0, 0]) ** 2])
    assert losses == [[1.0] * 4, [4.0] * 4]


# ----------------------------------------------------------------------------------------- what the user's object gets


def nnx_trainer(model, **settings):
    config = TrainingConfig(max_epochs=2, optimizer="sgd", learning_rate=0.05, device="cpu", **settings)
    return Trainer(model, batches(4), backend=JaxBackend(), config=config)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["train", "train_epoch"])
def test_an_nnx_module_has_its_weights_and_statistics_after_training(how):
    model = nnx_model(torch_model().state_dict(), norm=True)
    run = nnx_trainer(model)
    getattr(run, how)()
    kernel, mean = (np.asarray(each[...]) for each in (model.first.kernel, model.norm.mean))
    shown = {name: tensor.numpy() for name, tensor in run.model.state_dict().items()}
    np.testing.assert_array_equal(kernel, shown["first/kernel"])
    np.testing.assert_array_equal(mean, shown["norm/mean"])
    assert mean.any()
    assert not np.array_equal(kernel, torch_model().state_dict()["0.weight"].T.numpy())
    run.train_epoch()  # its memory is its own: the next steps leave it alone until they are over
    assert not np.array_equal(model.norm.mean[...], mean)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_calling_the_trainers_model_gives_the_models_outputs(norm):
    model, inputs = nnx_model(torch_model().state_dict(), dropout=0.5, norm=norm), batches(1)[0][0]
    run = nnx_trainer(model)
    untrained = run.model(inputs)
    run.train()
    found = run.model(inputs)
    assert isinstance(found, torch.Tensor)
    model.eval()
    np.testing.assert_allclose(found, model(inputs.numpy()), rtol=1e-5, atol=1e-6)
    assert not torch.equal(found, untrained)


# ------------------------------------------------------------------------------------------------------- beside torch


class Words(nn.Module):
    """Every kind of weight that no_decay="auto" distinguishes."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def words(weights, tokens):
    """The same in JAX."""
    hidden = weights["embed.weight"][tokens]
    hidden = (hidden - hidden.mean(-1, keepdims=True)) / jnp.sqrt(hidden.var(-1, keepdims=True) + 1e-5)
    hidden = hidden * weights["norm.weight"] + weights["norm.bias"]
    return hidden @ weights["head.weight"].T + weights["head.bias"]


@pytest.mark.slow
@pytest.mark.parametrize("no_decay", ["auto", None, lambda name, parameter: name == "head.weight"])
def test_the_same_parameters_are_spared_decay_as_in_torch(no_decay):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Words()
    nn.init.constant_(model.norm.bias, 0.5)
    weights = {name: tensor.detach().numpy().copy() for name, tensor in model.named_parameters()}
    tokens, targets = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([0, 1, 2, 0, 1, 2])
    options = {"learning_rate": 0.01, "weight_decay": 5.0, "no_decay": no_decay}
    optimizer, core = create_optimizer(model, "adamw", **options), core_of()
    state = core.init((words, weights), "adamw", **options)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), targets).backward()
        optimizer.step()
        state = core.train_step((tokens, targets), state).state
    for name, parameter in model.named_parameters():
        found = state.weights["parameters"][name]
        np.testing.assert_allclose(found, parameter.detach(), rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_arrays_cross_to_torch_without_a_copy_on_a_cpu():
    core = core_of()
    state = core.init(function_model(torch_model().state_dict()), "sgd")
    shown = core.backend.flat(state.weights["parameters"])
    for path, array in core.backend.paths(state.weights["parameters"]).items():
        assert shown[path].data_ptr() == array.unsafe_buffer_pointer(), path
    outputs = jnp.ones((16, 3)) * 2
    assert core.backend.to_torch({"outputs": outputs})["outputs"].data_ptr() == outputs.unsafe_buffer_pointer()


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.slow
def test_a_loop_written_by_hand_is_refused():
    with pytest.raises(ConfigurationError, match=r"Loop\(backend=JaxBackend\): .*computes in place; use a Trainer"):
        Loop(function_model(torch_model().state_dict()), batches(1), backend=JaxBackend())


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [{"precision": "bf16"}, {"compile": True}, {"activation_checkpointing": "first"}], ids=str
)
def test_a_trainer_refuses_settings_of_torch_and_leaves_the_model(setting):
    model = nnx_model(torch_model().state_dict())
    before = bits(JaxBackend("cpu"), {"kernel": model.first.kernel[...]})
    (name,) = setting
    with pytest.raises(ConfigurationError, match=rf"TrainingConfig\({name}=.* JaxBackend"):
        nnx_trainer(model, **setting)
    assert bits(JaxBackend("cpu"), {"kernel": model.first.kernel[...]}) == before
