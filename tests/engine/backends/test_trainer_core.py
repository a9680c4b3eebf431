"""The functional core: steps that leave what they are given as it is, whatever computes them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pulsetrain.engine import ConfigurationError, PretrainStrategy, SupervisedStrategy, TorchBackend
from pulsetrain.engine.backends.core import TrainerCore
from pulsetrain.engine.backends.jax import JaxBackend
from pulsetrain.engine.schedules import Cosine
from pulsetrain.engine.step.protocols import BackendSettings, ModelState, TrainingBatch
from tests.plugins.numpy_backend import Linear, NumpyBackend
from tests.support.losses import needs_jax
from tests.support.runs_backends import programs_kept

ALL = ["torch", pytest.param("jax", marks=needs_jax), "numpy"]
MAKE = {"torch": lambda: TorchBackend(functional=True), "jax": JaxBackend, "numpy": NumpyBackend}


@pytest.fixture(scope="module", autouse=True)
def _programs_kept():
    with programs_kept():
        yield


def jax_model(weights, inputs, train=False, key=None):
    """A layer with dropout before it."""
    import jax

    if train:
        inputs = inputs * jax.random.bernoulli(key, 0.5, inputs.shape)
    return inputs @ weights["weight"].T + weights["bias"]


def model_of(library, inputs=4, outputs=3):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.zeros(outputs)
    if library == "numpy":
        return Linear(weight.numpy(), bias.numpy())
    if library == "jax":
        return jax_model, {"weight": weight.numpy(), "bias": bias.numpy()}
    layer = nn.Linear(inputs, outputs)
    layer.load_state_dict({"weight": weight, "bias": bias})
    return nn.Sequential(nn.BatchNorm1d(inputs), layer)


def batch_of(rows=5, inputs=4, outputs=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=generator), torch.randn(rows, outputs, generator=generator)


def core_of(library, **options):
    return TrainerCore(MAKE[library](), SupervisedStrategy("mse"), BackendSettings(device="cpu", **options))


def bits(core, *values):
    """Each leaf by its place and path; arrays by their bytes."""
    found = {}
    for number, value in enumerate(values):
        tree = (value.weights, value.optimizer) if isinstance(value, ModelState) else value
        for path, leaf in core.backend.flat(tree).items():
            found[f"{number}/{path}"] = leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else leaf
    return found


def is_pure(core, batch, state):
    before = bits(core, state, batch)
    first, second = core.train_step(batch, state), core.train_step(batch, state)
    assert bits(core, state, batch) == before
    assert bits(core, first.state, first.metrics["loss"]) == bits(core, second.state, second.metrics["loss"])
    assert bits(core, first.state) != bits(core, state)
    # on from what a step gave, which stays what it is as well
    held = bits(core, first.state)
    third = core.train_step(batch, first.state)
    assert bits(core, first.state) == held
    assert third.state.metadata["step"] == 2
    assert bits(core, core.train_step(batch, second.state).state) == bits(core, third.state)


CLIPPED = {"clip_grad_norm": 0.1, "clip_grad_value": 0.01}
CASES = [("torch", "sgd", {}), ("torch", "adamw", {}), ("torch", "rmsprop", CLIPPED)]
CASES += [pytest.param("jax", name, options, marks=needs_jax) for name, options in (("sgd", {}), ("adamw", CLIPPED))]
CASES += [("numpy", "sgd", {}), ("numpy", "sgd", CLIPPED)]


@pytest.mark.parametrize(("library", "optimizer", "options"), CASES)
def test_a_step_leaves_batch_weights_and_optimizer_as_they_are_and_gives_the_same_bits_again(
    library, optimizer, options
):
    core = core_of(library, **options)
    is_pure(core, batch_of(), core.init(model_of(library), optimizer, learning_rate=0.1))


@pytest.mark.parametrize("library", ["torch", "numpy"])
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(2, 6), inputs=st.integers(1, 5), outputs=st.integers(1, 4))
def test_steps_are_pure_for_every_shape(library, rows, inputs, outputs):
    core = core_of(library)
    is_pure(core, batch_of(rows, inputs, outputs), core.init(model_of(library, inputs, outputs), "sgd"))


@pytest.mark.parametrize("library", ALL)
def test_a_step_reports_loss_norm_seconds_memory_and_communication(library):
    core = core_of(library)
    state = core.init(model_of(library), "sgd", learning_rate=0.1)
    result = core.train_step(batch_of(), state)
    assert list(result.metrics) == ["loss", "grad_norm", "seconds"]
    assert list(result.diagnostics) == ["memory_bytes", "communication_bytes"]
    assert result.loss is result.metrics["loss"]
    assert result.metrics["loss"].shape == result.metrics["grad_norm"].shape == ()
    assert float(result.loss) > 0
    assert float(result.metrics["grad_norm"]) > 0
    assert result.metrics["seconds"] > 0
    assert result.diagnostics["memory_bytes"] is None, "a CPU does not report it"
    assert result.diagnostics["communication_bytes"] == 0


@pytest.mark.parametrize("library", ALL)
def test_evaluation_is_pure_and_its_loss_is_that_before_the_step(library):
    core = core_of(library)
    batch, state = batch_of(), core.init(model_of(library), "sgd")
    before = bits(core, state, batch)
    loss = core.eval_step(batch, state)["loss"]
    assert bits(core, state, batch) == before
    assert bits(core, loss) == bits(core, core.eval_step(batch, state)["loss"])
    if library == "numpy":  # the others train with dropout, or with the batch's own statistics
        assert bits(core, loss) == bits(core, core.train_step(batch, state).loss)


@pytest.mark.parametrize("library", ALL)
def test_an_epoch_is_its_steps(library):
    core = core_of(library)
    state = core.init(model_of(library), "sgd", learning_rate=0.1)
    before, batches, reported = bits(core, state), [batch_of(seed=seed) for seed in range(4)], []
    last = core.train_epoch(batches, state, reported.append)
    assert bits(core, state) == before
    assert [result.state.metadata["step"] for result in reported] == [1, 2, 3, 4]
    assert reported[-1].state is last
    assert float(reported[-1].loss) != float(reported[0].loss)
    by_hand = state
    for batch in batches:
        by_hand = core.train_step(batch, by_hand).state
    assert bits(core, by_hand) == bits(core, last) == bits(core, core.train_epoch(iter(batches), state))
    with pytest.raises(ValueError, match="no batch was given; an iterator can be read only once"):
        core.train_epoch([], state)


@pytest.mark.parametrize("library", ALL)
def test_a_schedule_is_read_at_the_number_of_the_update(library):
    core = core_of(library)
    schedule = Cosine(initial_lr=0.1, total_steps=4)
    plain = core.init(model_of(library), "sgd", learning_rate=0.1)
    state = replace(plain, metadata={**plain.metadata, "schedule": schedule})
    rates = []
    for _ in range(3):
        state = core.train_step(batch_of(), state).state
        rates.append(state.metadata["learning_rate"])
    assert rates == [schedule.get_lr(step) for step in range(3)]
    given = core.init(model_of(library), "sgd", learning_rate=0.1, schedule=schedule)
    for _ in range(3):
        given = core.train_step(batch_of(), given).state
    assert bits(core, given) == bits(core, state)
    for rate in rates:
        plain = core.train_step(batch_of(), replace(plain, metadata={**plain.metadata, "learning_rate": rate})).state
    assert bits(core, plain) == bits(core, state)


@pytest.mark.parametrize("library", ALL)
def test_another_optimizer_state_may_be_given(library):
    core = core_of(library)
    first = core.init(model_of(library), "sgd", learning_rate=0.1)
    second = core.train_step(batch_of(), first).state
    mixed = core.train_step(batch_of(), second, first.optimizer).state
    assert bits(core, mixed) != bits(core, core.train_step(batch_of(), second).state)
    assert bits(core, mixed) == bits(
        core, core.train_step(batch_of(), replace(second, optimizer=first.optimizer)).state
    )


@pytest.mark.parametrize("library", ALL[1:])
def test_batches_of_numpy_and_ready_ones_are_as_good_as_torchs(library):
    core = core_of(library)
    state = core.init(model_of(library), "sgd", learning_rate=0.1)
    inputs, targets = batch_of()
    expected = bits(core, core.train_step((inputs, targets), state).state)
    for batch in (
        (inputs.numpy(), targets.numpy()),
        [inputs, targets.numpy()],
        TrainingBatch(inputs, targets, 5, 0, targets.numel()),
        (np.lib.stride_tricks.as_strided(inputs.numpy(), writeable=False), targets.numpy()),
    ):
        assert bits(core, core.train_step(batch, state).state) == expected


@pytest.mark.slow
@needs_jax
def test_a_batch_may_be_overwritten_as_soon_as_the_step_has_returned():
    """The program runs on beside the caller, who may fill the same memory with the next batch."""

    def deep(weights, inputs):
        for _ in range(6):
            inputs = inputs @ weights["square"]
        return inputs

    core = core_of("jax")
    size = 1000
    state = core.init((deep, {"square": np.eye(size, dtype="float32")}), "sgd", learning_rate=0.1)
    inputs, targets = torch.ones(256, size), torch.zeros(256, size)
    core.train_step((inputs, targets), state)
    result = core.train_step((inputs, targets), state)
    inputs.fill_(3.0)
    assert float(result.loss) == 1.0


@needs_jax
def test_jax_random_numbers_follow_the_number_of_the_update():
    core = core_of("jax", seed=3)
    state = core.init(model_of("jax"), "sgd", learning_rate=1e-30)
    losses = []
    for _ in range(3):
        result = core.train_step(batch_of(), state)
        losses.append(float(result.loss))
        state = result.state
    assert len(set(losses)) == 3, "another mask each time"
    other = core_of("jax", seed=4)
    assert float(other.train_step(batch_of(), other.init(model_of("jax"), "sgd")).loss) != losses[0]


@pytest.mark.parametrize("library", ALL)
def test_values_are_checked_only_before_the_first_update(library):
    class Looking(SupervisedStrategy):
        looked = 0

        def check_batch(self, outputs, batch):
            self.looked += 1

    core = core_of(library)
    core.strategy = Looking("mse")
    state = core.init(model_of(library), "sgd")
    result = core.train_step(batch_of(), state)
    looked = core.strategy.looked
    assert looked > 0
    core.train_step(batch_of(), result.state)
    assert core.strategy.looked == looked
    core.train_step(batch_of(), state)
    assert core.strategy.looked > looked
    with pytest.raises(TypeError, match="cannot be split"):
        core.train_step(None, result.state)


# ------------------------------------------------------------------------------------------------------ mistakes


def refused(error, message, call, core, state):
    before = bits(core, state)
    with pytest.raises(error, match=message):
        call()
    assert bits(core, state) == before


def test_a_backend_in_place_has_no_pure_steps():
    with pytest.raises(ConfigurationError, match=r"TorchBackend\): computes in place.*TorchBackend\(functional=True\)"):
        TrainerCore(TorchBackend(), SupervisedStrategy("mse"))


def test_a_strategy_and_an_optimizer_of_another_kind_are_refused():
    backend = TorchBackend(functional=True)
    with pytest.raises(TypeError, match="needs an object with prepare_batch, compute_loss and compute_metrics"):
        TrainerCore(backend, object())
    core, model = TrainerCore(backend, SupervisedStrategy("mse")), model_of("torch")
    with pytest.raises(
        ConfigurationError, match=r"TrainerCore.init\(optimizer=SGD\): .* needs a name or an object with"
    ):
        core.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="muon"):
        core.init(model, "muon")


@pytest.mark.parametrize("library", ALL)
def test_a_backend_without_a_model_says_so(library):
    core = core_of(library)
    state = core.init(model_of(library), "sgd")
    with pytest.raises(ConfigurationError, match="has neither model nor optimizer yet; call init"):
        core_of(library).train_step(batch_of(), state)


@pytest.mark.parametrize("library", ALL)
@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (
            torch.ones(4, 4),
            TypeError,
            "SupervisedStrategy: a batch of Tensor cannot be split; let the loader return pai",
        ),
        ({"inputs": torch.ones(4, 4)}, TypeError, "SupervisedStrategy: a batch with inputs has no field 'labels' or "),
        ((torch.ones(4, 4),), TypeError, "SupervisedStrategy: a batch of tuple of 1 cannot be split"),
        ((torch.ones(0, 4), torch.ones(0, 3)), ValueError, r"a batch of 0 samples, inputs float32 \(0, 4\)"),
        ((torch.ones(4, 4), torch.ones(4, 2)), ValueError, "mse"),
    ],
    ids=["tensor", "dict", "one", "empty", "other shapes"],
)
def test_a_batch_that_cannot_be_trained_on_is_refused(library, batch, error, message):
    core = core_of(library)
    state = core.init(model_of(library), "sgd")
    refused(error, message, lambda: core.train_step(batch, state), core, state)


@pytest.mark.parametrize("library", ALL)
def test_a_batch_without_the_field_that_the_strategy_needs_names_it(library):
    core = core_of(library)
    state = core.init(model_of(library), "sgd")
    tokens = TrainerCore(core.backend, PretrainStrategy())
    refused(TypeError, "lacks 'input_ids'", lambda: tokens.train_step({"tokens": torch.ones(2, 3)}, state), core, state)
    refused(TypeError, "tensor of token ids", lambda: tokens.train_step(torch.ones(2), state), core, state)


@pytest.mark.parametrize("library", ALL)
def test_an_optimizer_state_of_other_weights_is_refused(library):
    core = core_of(library)
    other = core.init(model_of(library, outputs=2), "sgd")
    state = core.init(model_of(library), "sgd")
    message = (
        r"does not fit the weights: .* is of shape \(2.*\), and for these weights it is of shape \(3.*make a new one"
    )
    refused(ConfigurationError, message, lambda: core.train_step(batch_of(), state, other.optimizer), core, state)
    refused(ConfigurationError, "is .*missing", lambda: core.train_step(batch_of(), state, {}), core, state)
    mixed = replace(state, weights=other.weights)
    refused(ConfigurationError, "does not fit the weights", lambda: core.train_step(batch_of(), mixed), core, state)


@pytest.mark.parametrize("library", ALL)
def test_weights_of_another_backend_are_refused(library):
    core = core_of(library)
    state = core.init(model_of(library), "sgd")
    found = {"torch": torch.ones(3), "jax": None, "numpy": np.ones(3)}
    for name, leaf in found.items():
        if name == library or leaf is None:
            continue
        weights = {**state.weights, "parameters": {**state.weights["parameters"], "extra": leaf}}
        message = rf"weights\['parameters/extra'\] is {name}\..*, of another backend or device; make the state by this"
        foreign = replace(state, weights=weights)
        refused(TypeError, message, lambda foreign=foreign: core.train_step(batch_of(), foreign), core, state)
    for value in (None, state.weights, replace(state, weights=nn.Linear(2, 2))):
        refused(
            TypeError,
            "is not a ModelState of values",
            lambda value=value: core.train_step(batch_of(), value),
            core,
            state,
        )


def test_weights_on_another_device_are_refused():
    core = core_of("torch")
    state = core.init(model_of("torch"), "sgd")
    weights = {kind: {n: t.to("meta") for n, t in tensors.items()} for kind, tensors in state.weights.items()}
    message = r"is torch.Tensor on meta, of another backend or device"
    refused(TypeError, message, lambda: core.train_step(batch_of(), replace(state, weights=weights)), core, state)


@pytest.mark.parametrize("library", ALL)
def test_models_of_another_kind_are_refused(library):
    core = core_of(library)
    wrong = {"torch": jax_model, "jax": nn.Linear(2, 2), "numpy": nn.Linear(2, 2)}[library]
    with pytest.raises(TypeError, match=r"Backend(: |\()model=\w+\)?: needs a"):
        core.init(wrong, "sgd")


@pytest.mark.slow
@needs_jax
def test_a_schedule_over_an_optimizer_without_a_rate_is_refused():
    import optax

    core = core_of("jax")
    state = core.init(model_of("jax"), optax.adam(0.1), schedule=Cosine(initial_lr=0.1, total_steps=4))
    message = "sets the learning rate, and the optimizer's state holds none; make it by optax.inject_hyperparams"
    refused(ConfigurationError, message, lambda: core.train_step(batch_of(), state), core, state)
    plain = core.init(model_of("jax"), optax.adam(0.1))
    assert plain.metadata["learning_rate"] is None
    assert math.isfinite(float(core.train_step(batch_of(), plain).loss))
