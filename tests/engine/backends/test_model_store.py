"""What stands for weights that are values: a module and an optimizer of torch, read and written as any other."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from pulsetrain.engine import CheckpointError, ConfigurationError, SupervisedStrategy, TorchBackend
from pulsetrain.engine.backends.model_store import Held, HeldOptimizer, kind_of, shown_rate
from pulsetrain.engine.step.protocols import BackendSettings
from tests.plugins.numpy_backend import Linear, NumpyBackend, NumpySGD


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)


def numpy_held(optimizer=None):
    backend = NumpyBackend()
    backend.configure(BackendSettings())
    model = Linear(np.full((3, 4), 0.5, "float32"), np.zeros(3, "float32"))
    return Held(backend, model, backend.init(model, optimizer or NumpySGD(0.1)))


def torch_held():
    backend = TorchBackend(functional=True, device="cpu")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    backend.configure(BackendSettings(device="cpu"))
    optimizer = backend.create_optimizer(model, "sgd", 0.1, 0.0)
    return Held(backend, model, backend.init(model, optimizer))


MAKE = pytest.mark.parametrize("make", [numpy_held, torch_held], ids=["numpy", "torch"])


def step(held):
    strategy = SupervisedStrategy("mse")
    prepared = held.backend.prepare_batch(batch(), strategy)
    held.take(held.backend.train_step(held.state, prepared, strategy, donate=True).state)


def leaves(held):
    """The state's weights as torch tensors by their paths."""
    tree = {**held.state.weights["parameters"], **held.state.weights["buffers"]}
    return {path: torch.as_tensor(tensor).clone() for path, tensor in held.backend.flat(tree).items()}


@MAKE
def test_the_module_shows_the_newest_weights(make):
    held = make()
    parameters = list(held.module.parameters())
    for _ in range(3):
        step(held)
        expected = leaves(held)
        assert held.module.state_dict().keys() == expected.keys()
        for name, tensor in held.module.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    assert [id(each) for each in held.module.parameters()] == [id(each) for each in parameters], "the same objects"
    assert [id(each) for each in held.optimizer.param_groups[0]["params"]] == [id(each) for each in parameters]
    for name, parameter in held.module.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@MAKE
def test_what_is_written_into_the_module_counts_from_the_next_step(make):
    held, untouched = make(), make()
    for each in (held, untouched):
        step(each)
    with torch.no_grad():
        for parameter in held.module.parameters():
            parameter.fill_(0.25)
    assert all((tensor == 0.25).all() for name, tensor in leaves(held).items() if name.endswith(("weight", "bias")))
    step(held)
    step(untouched)
    mine, others = leaves(held), leaves(untouched)
    assert all(not torch.equal(mine[name], others[name]) for name in mine if name.endswith("weight"))
    held.module.load_state_dict(untouched.module.state_dict())
    mine = leaves(held)
    assert all(torch.equal(mine[name], others[name]) for name in mine)


def test_a_call_of_the_model_takes_what_was_written_and_the_state_has_it_too():
    held = numpy_held()
    step(held)
    inputs = batch()[0]
    with torch.no_grad():
        for parameter in held.module.parameters():
            parameter.zero_()
    assert not held.module(inputs).any()
    assert not any(tensor.any() for tensor in leaves(held).values())


@MAKE
def test_a_copy_is_nobody_elses(make):
    held = make()
    kept = held.copy()
    before = {path: torch.as_tensor(leaf).clone() for path, leaf in held.backend.flat(kept.weights).items()}
    step(held)
    with torch.no_grad():
        for parameter in held.module.parameters():
            parameter.zero_()
    step(held)
    for path, leaf in held.backend.flat(kept.weights).items():
        assert torch.equal(torch.as_tensor(leaf), before[path]), path


@MAKE
@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5), np.float64(0.5)], ids=["float", "tensor", "numpy"])
def test_the_rate_of_the_group_is_that_of_the_next_update(make, rate):
    held = make()
    assert held.optimizer.param_groups[0]["lr"] == 0.1
    held.optimizer.param_groups[0]["lr"] = rate
    assert held.state.metadata["learning_rate"] == 0.5
    assert type(held.state.metadata["learning_rate"]) is float
    before, other = leaves(held), make()
    step(held)
    step(other)
    moved, less = leaves(held)["1.bias" if make is torch_held else "bias"], leaves(other)
    name = "1.bias" if make is torch_held else "bias"
    torch.testing.assert_close(moved - before[name], 5 * (less[name] - before[name]))


@MAKE
def test_a_torch_schedule_sets_it(make, recwarn):
    held = make()
    schedule = torch.optim.lr_scheduler.StepLR(held.optimizer, 1, 0.5)
    step(held)
    schedule.step()
    assert held.state.metadata["learning_rate"] == 0.05
    assert not recwarn.list


@MAKE
def test_the_state_goes_to_a_dict_of_tensors_and_back(make):
    held, other = make(), make()
    for _ in range(2):
        step(held)
    held.optimizer.param_groups[0]["lr"] = 0.03
    saved = held.optimizer.state_dict()
    assert all(isinstance(value, (torch.Tensor, float, int)) for value in saved["state"].values())
    other.module.load_state_dict(held.module.state_dict())
    other.optimizer.load_state_dict(saved)
    assert other.state.metadata == held.state.metadata
    for each in (held, other):
        step(each)
    mine, theirs = leaves(held), leaves(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@MAKE
def test_another_optimizers_state_is_refused_and_nothing_changes(make):
    held = make()
    step(held)
    before, rate, saved = leaves(held), held.optimizer.param_groups[0]["lr"], held.optimizer.state_dict()
    in_place = torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.9).state_dict()
    path = next(path for path in saved["state"] if path.endswith("weight"))
    lacking = {**saved, "state": {name: value for name, value in saved["state"].items() if name != path}}
    misshapen = {**saved, "state": {**saved["state"], path: torch.ones(2, 2)}}
    surplus = {**saved, "state": {**saved["state"], "more": 1.0}}
    for state, message in (
        (in_place, "is one of torch.optim, and .*Backend computes with values; go on with the backend"),
        (lacking, f"the optimizer's state: {path} is not in the checkpoint; use the model and optimizer that it was"),
        (misshapen, rf"the optimizer's state: {path} is \(2, 2\) in the checkpoint, \("),
        (surplus, "the optimizer's state: more is not here; use the model"),
    ):
        for load in (held.optimizer.check_state_dict, held.optimizer.load_state_dict):
            with pytest.raises(CheckpointError, match=message):
                load(state)
    assert held.optimizer.param_groups[0]["lr"] == rate
    after = leaves(held)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_gradients_that_wait_go_to_a_dict_and_back():
    held, strategy = numpy_held(), SupervisedStrategy("mse")
    prepared = held.backend.prepare_batch(batch(), strategy)
    assert held.gradients() == {}
    held.wait(held.backend.forward_backward(held.state, prepared, strategy, 0.5))
    saved = {name: tensor.clone() for name, tensor in held.gradients().items()}
    assert list(saved) == ["weight", "bias"]
    other = numpy_held()
    go_on = other.load_gradients(saved, 1)
    assert other.waiting is None, "not before everything else has been accepted"
    go_on()
    assert other.waiting.batches == 1
    twice = numpy_held()
    twice.load_gradients(saved, 2)()
    assert twice.waiting.batches == 2, "by which the next batch knows which one of its update it is"
    for each in (held, other):
        found = each.backend.forward_backward(each.state, prepared, strategy, 0.5, each.waiting)
        assert found.batches == 2
        np.testing.assert_allclose(found.gradients["weight"], 2 * saved["weight"].numpy(), rtol=1e-6)
    held.optimizer.zero_grad()
    assert held.gradients() == {}
    other.load_gradients({}, 0)()
    assert other.waiting is None
    with pytest.raises(CheckpointError, match="accumulated gradients: bias is not in the checkpoint"):
        other.load_gradients({"weight": saved["weight"]}, 1)


def test_its_step_is_refused_and_its_name_is_that_of_both():
    held = numpy_held()
    with pytest.raises(RuntimeError, match=r"NumpyBackend makes the updates itself; call Trainer.train\(\)"):
        held.optimizer.step()
    assert isinstance(held.optimizer, HeldOptimizer)
    assert kind_of(held.optimizer) == "NumpySGD of NumpyBackend"
    assert kind_of(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)) == "SGD"


class WithoutRate(NumpySGD):
    def init(self, params):
        return {}

    def update(self, grads, opt_state, params):
        return {name: -0.1 * gradient for name, gradient in grads.items()}, {}


def test_a_rate_that_the_optimizer_does_not_hold_is_nan_and_cannot_be_set():
    held = numpy_held(WithoutRate(0.1))
    assert math.isnan(held.optimizer.param_groups[0]["lr"])
    assert held.state.metadata["learning_rate"] is None
    assert (shown_rate(None),) == (shown_rate(None),), "as two rounds of rates are compared"
    step(held)
    held.optimizer.load_state_dict(held.optimizer.state_dict())
    assert held.state.metadata["learning_rate"] is None
    before = leaves(held)
    held.optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(ConfigurationError, match="sets the learning rate, and the optimizer's state holds none"):
        step(held)
    after = leaves(held)
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
    held = Held(backend, None, backend.init(None, WithoutRate(0.1)))
    assert [name for name, _ in held.module.named_parameters()] == names
    saved = {name: torch.full_like(tensor, 3.0) for name, tensor in held.module.state_dict().items()}
    held.module.load_state_dict(saved)
    assert all((tensor == 3.0).all() for tensor in backend.flat(held.state.weights["parameters"]).values())
    assert backend.paths(held.state.weights["parameters"]).keys() == backend.paths(weights).keys()


def test_two_weights_of_one_name_are_refused():
    backend = Nested({"a.b": np.ones(2), "a": {"b": np.ones(2)}})
    state = backend.init(None, WithoutRate(0.1))
    with pytest.raises(ConfigurationError, match=r"Nested: the weights 'a.b' and 'a/b' would have one name, 'a/b'"):
        Held(backend, None, state)
