"""The interface to by-value weights: a torch module and optimizer, read and written like any other."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from pulsetrain.engine import CheckpointError, ConfigurationError, SupervisedStrategy, TorchBackend
from pulsetrain.engine.backends.model_store import OptimizerView, ValueStore, optimizer_type
from pulsetrain.engine.step.protocols import BackendSettings
from pulsetrain.training.stepper import rates_of
from tests.plugins.numpy_backend import Linear, NumpyBackend, NumpySGD


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)


def numpy_store(optimizer=None):
    backend = NumpyBackend()
    backend.configure(BackendSettings())
    model = Linear(np.full((3, 4), 0.5, "float32"), np.zeros(3, "float32"))
    return ValueStore(backend, model, backend.init(model, optimizer or NumpySGD(0.1)))


def torch_store():
    backend = TorchBackend(functional=True, device="cpu")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    backend.configure(BackendSettings(device="cpu"))
    optimizer = backend.create_optimizer(model, "sgd", 0.1, 0.0)
    return ValueStore(backend, model, backend.init(model, optimizer))


MAKE = pytest.mark.parametrize("make", [numpy_store, torch_store], ids=["numpy", "torch"])


def step(store):
    strategy = SupervisedStrategy("mse")
    prepared = store.backend.prepare_batch(batch(), strategy)
    store.commit(store.backend.train_step(store.state, prepared, strategy, donate=True).state)


def leaves(store):
    """The state's weights as torch tensors by their paths."""
    tree = {**store.state.weights["parameters"], **store.state.weights["buffers"]}
    return {path: torch.as_tensor(tensor).clone() for path, tensor in store.backend.flat(tree).items()}


@MAKE
def test_the_module_shows_the_newest_weights(make):
    store = make()
    parameters = list(store.module.parameters())
    for _ in range(3):
        step(store)
        expected = leaves(store)
        assert store.module.state_dict().keys() == expected.keys()
        for name, tensor in store.module.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    assert [id(each) for each in store.module.parameters()] == [id(each) for each in parameters], "the same objects"
    assert [id(each) for each in store.optimizer.param_groups[0]["params"]] == [id(each) for each in parameters]
    for name, parameter in store.module.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@MAKE
def test_what_is_written_into_the_module_counts_from_the_next_step(make):
    store, untouched = make(), make()
    for each in (store, untouched):
        step(each)
    with torch.no_grad():
        for parameter in store.module.parameters():
            parameter.fill_(0.25)
    assert all((tensor == 0.25).all() for name, tensor in leaves(store).items() if name.endswith(("weight", "bias")))
    step(store)
    step(untouched)
    mine, others = leaves(store), leaves(untouched)
    assert all(not torch.equal(mine[name], others[name]) for name in mine if name.endswith("weight"))
    store.module.load_state_dict(untouched.module.state_dict())
    mine = leaves(store)
    assert all(torch.equal(mine[name], others[name]) for name in mine)


def test_a_call_of_the_model_takes_what_was_written_and_the_state_has_it_too():
    store = numpy_store()
    step(store)
    inputs = batch()[0]
    with torch.no_grad():
        for parameter in store.module.parameters():
            parameter.zero_()
    assert not store.module(inputs).any()
    assert not any(tensor.any() for tensor in leaves(store).values())


@MAKE
def test_a_copy_is_independent(make):
    store = make()
    kept = store.snapshot()
    before = {path: torch.as_tensor(leaf).clone() for path, leaf in store.backend.flat(kept.weights).items()}
    step(store)
    with torch.no_grad():
        for parameter in store.module.parameters():
            parameter.zero_()
    step(store)
    for path, leaf in store.backend.flat(kept.weights).items():
        assert torch.equal(torch.as_tensor(leaf), before[path]), path


@MAKE
@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5), np.float64(0.5)], ids=["float", "tensor", "numpy"])
def test_the_rate_of_the_group_is_that_of_the_next_update(make, rate):
    store = make()
    assert store.optimizer.param_groups[0]["lr"] == 0.1
    store.optimizer.param_groups[0]["lr"] = rate
    assert store.state.metadata["learning_rate"] == 0.5
    assert type(store.state.metadata["learning_rate"]) is float
    before, other = leaves(store), make()
    step(store)
    step(other)
    moved, less = leaves(store)["1.bias" if make is torch_store else "bias"], leaves(other)
    name = "1.bias" if make is torch_store else "bias"
    torch.testing.assert_close(moved - before[name], 5 * (less[name] - before[name]))


@MAKE
def test_a_torch_schedule_sets_it(make, recwarn):
    store = make()
    schedule = torch.optim.lr_scheduler.StepLR(store.optimizer, 1, 0.5)
    step(store)
    schedule.step()
    assert store.state.metadata["learning_rate"] == 0.05
    assert not recwarn.list


@MAKE
def test_the_state_goes_to_a_dict_of_tensors_and_back(make):
    store, other = make(), make()
    for _ in range(2):
        step(store)
    store.optimizer.param_groups[0]["lr"] = 0.03
    saved = store.optimizer.state_dict()
    assert all(isinstance(value, (torch.Tensor, float, int)) for value in saved["state"].values())
    other.module.load_state_dict(store.module.state_dict())
    other.optimizer.load_state_dict(saved)
    assert other.state.metadata == store.state.metadata
    for each in (store, other):
        step(each)
    mine, theirs = leaves(store), leaves(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@MAKE
def test_another_optimizers_state_is_refused_and_nothing_changes(make):
    store = make()
    step(store)
    before, rate, saved = leaves(store), store.optimizer.param_groups[0]["lr"], store.optimizer.state_dict()
    in_place = torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.9).state_dict()
    path = next(path for path in saved["state"] if path.endswith("weight"))
    lacking = {**saved, "state": {name: value for name, value in saved["state"].items() if name != path}}
    misshapen = {**saved, "state": {**saved["state"], path: torch.ones(2, 2)}}
    surplus = {**saved, "state": {**saved["state"], "more": 1.0}}
    for state, message in (
        (in_place, "is one of torch.optim, and .*Backend computes with values; resume with the backend"),
        (lacking, f"the optimizer's state: {path} is not in the checkpoint; use the model and optimizer that it was"),
        (misshapen, rf"the optimizer's state: {path} is \(2, 2\) in the checkpoint, \("),
        (surplus, "the optimizer's state: more is not here; use the model"),
    ):
        for load in (store.optimizer.check_state_dict, store.optimizer.load_state_dict):
            with pytest.raises(CheckpointError, match=message):
                load(state)
    assert store.optimizer.param_groups[0]["lr"] == rate
    after = leaves(store)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_gradients_that_wait_go_to_a_dict_and_back():
    store, strategy = numpy_store(), SupervisedStrategy("mse")
    prepared = store.backend.prepare_batch(batch(), strategy)
    assert store.gradients() == {}
    store.hold(store.backend.forward_backward(store.state, prepared, strategy, 0.5))
    saved = {name: tensor.clone() for name, tensor in store.gradients().items()}
    assert list(saved) == ["weight", "bias"]
    other = numpy_store()
    adopt = other.load_gradients(saved, 1)
    assert other.waiting is None, "not before everything else has been accepted"
    adopt()
    assert other.waiting.batches == 1
    twice = numpy_store()
    twice.load_gradients(saved, 2)()
    assert twice.waiting.batches == 2, "by which the next batch knows which one of its update it is"
    for each in (store, other):
        found = each.backend.forward_backward(each.state, prepared, strategy, 0.5, each.waiting)
        assert found.batches == 2
        np.testing.assert_allclose(found.gradients["weight"], 2 * saved["weight"].numpy(), rtol=1e-6)
    store.optimizer.zero_grad()
    assert store.gradients() == {}
    other.load_gradients({}, 0)()
    assert other.waiting is None
    with pytest.raises(CheckpointError, match="accumulated gradients: bias is not in the checkpoint"):
        other.load_gradients({"weight": saved["weight"]}, 1)


def test_its_step_is_refused_and_its_name_is_that_of_both():
    store = numpy_store()
    with pytest.raises(RuntimeError, match=r"NumpyBackend makes the updates itself; call Trainer.train\(\)"):
        store.optimizer.step()
    assert isinstance(store.optimizer, OptimizerView)
    assert optimizer_type(store.optimizer) == "NumpySGD of NumpyBackend"
    assert optimizer_type(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)) == "SGD"


class WithoutRate(NumpySGD):
    def init(self, params):
        return {}

    def update(self, grads, opt_state, params):
        return {name: -0.1 * gradient for name, gradient in grads.items()}, {}


def test_a_rate_that_the_optimizer_does_not_hold_is_nan_and_cannot_be_set():
    store = numpy_store(WithoutRate(0.1))
    assert math.isnan(store.optimizer.param_groups[0]["lr"])
    assert store.state.metadata["learning_rate"] is None
    assert rates_of(store.optimizer) == rates_of(numpy_store(WithoutRate(0.1)).optimizer), "as checkpoints compare them"
    step(store)
    store.optimizer.load_state_dict(store.optimizer.state_dict())
    assert store.state.metadata["learning_rate"] is None
    before = leaves(store)
    store.optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(ConfigurationError, match="sets the learning rate, and the optimizer's state holds none"):
        step(store)
    after = leaves(store)
    assert all(torch.equal(before[name], after[name]) for name in before)


class Nested(NumpyBackend):
    """Weights under names that torch has no place for."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def split(self, model):
        return {"parameters": self.weights, "buffers": {}}


@pytest.mark.parametrize(
    ("weights", "names"),
    [
        ({"0.weight": np.ones(2), "0.bias": np.zeros(2)}, ["0/weight", "0/bias"]),
        (np.ones(2), ["weights"]),
        ({"module": np.ones(2), "forward": np.ones(2), "type": np.ones(1)}, ["module", "forward", "type"]),
        ([{"a": np.ones(2)}, (np.ones(1), np.ones(3))], ["0/a", "1/0", "1/1"]),
    ],
    ids=["dots", "one array", "of methods", "nested"],
)
def test_weights_may_have_any_names(weights, names):
    backend = Nested(weights)
    store = ValueStore(backend, None, backend.init(None, WithoutRate(0.1)))
    assert [name for name, _ in store.module.named_parameters()] == names
    saved = {name: torch.full_like(tensor, 3.0) for name, tensor in store.module.state_dict().items()}
    store.module.load_state_dict(saved)
    assert all((tensor == 3.0).all() for tensor in backend.flat(store.state.weights["parameters"]).values())
    assert backend.paths(store.state.weights["parameters"]).keys() == backend.paths(weights).keys()


def test_two_weights_of_one_name_are_refused():
    backend = Nested({"a.b": np.ones(2), "a": {"b": np.ones(2)}})
    state = backend.init(None, WithoutRate(0.1))
    with pytest.raises(ConfigurationError, match=r"Nested: the weights 'a.b' and 'a/b' would have one name, 'a/b'"):
        ValueStore(backend, None, state)
