"""A torch module in the place of weights that are no torch tensors: copied, pickled, asked and written into."""

import copy
import pickle

import numpy as np
import pytest
import torch

from pulsetrain.engine import SupervisedStrategy
from pulsetrain.engine.backends.model_store import Held
from pulsetrain.engine.backends.module_view import Mirror
from pulsetrain.engine.step.protocols import BackendSettings
from tests.plugins.numpy_backend import Linear, NumpyBackend, NumpySGD


@pytest.fixture
def held():
    backend = NumpyBackend()
    backend.configure(BackendSettings())
    model = Linear(np.full((3, 4), 0.5, "float32"), np.zeros(3, "float32"))
    return Held(backend, model, backend.init(model, NumpySGD(0.1)))


def step(held):
    generator, strategy = torch.Generator().manual_seed(1), SupervisedStrategy("mse")
    pair = torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)
    prepared = held.backend.prepare_batch(pair, strategy)
    held.take(held.backend.train_step(held.state, prepared, strategy, donate=True).state)


def weight_of(held):
    """The state's own, as a tensor that nobody else has."""
    return torch.tensor(held._state.weights["parameters"]["weight"])


def test_a_deepcopy_has_the_newest_weights_and_is_nobody_elses(held):
    step(held)
    held.module.eval()
    copied, expected = copy.deepcopy(held.module), weight_of(held)
    assert isinstance(copied, Mirror)
    assert not copied.training
    assert torch.equal(copied.weight, expected)
    inputs = torch.ones(2, 4)
    outputs = copied(inputs)
    assert torch.equal(outputs, held.module(inputs))
    step(held)
    assert torch.equal(copied.weight, expected)
    assert torch.equal(copied(inputs), outputs)
    newest, another = weight_of(held), copy.deepcopy(held.module)
    with torch.no_grad():
        for parameter in another.parameters():
            parameter.zero_()
    assert torch.equal(weight_of(held), newest)
    assert torch.equal(held.module.weight, newest)
    assert not another(inputs).any(), "it computes with what was written into it"


def test_it_is_not_pickled_and_says_what_to_save(held):
    with pytest.raises(TypeError, match=r"model of a NumpyBackend is no torch module .*; save its state_dict\(\)"):
        pickle.dumps(held.module)


def test_a_parameter_that_is_asked_for_by_its_name_is_up_to_date_and_stays_so(held):
    step(held)
    by_name = held.module.get_parameter("weight")
    assert torch.equal(by_name, weight_of(held))
    step(held)
    assert torch.equal(by_name, weight_of(held))
    assert held.module.weight is by_name


def test_writing_through_a_tensor_of_an_older_state_is_refused(held):
    old = held.module.state_dict()["weight"]
    step(held)
    before = weight_of(held)
    assert not torch.equal(old, before)
    old.zero_()
    with pytest.raises(RuntimeError, match=r"through a tensor that is no longer up to date; take it from"):
        _ = held.state
    assert torch.equal(weight_of(held), before)


def test_asking_for_them_by_a_state_dict_costs_no_copy_at_each_step(held):
    tensor = held.module.state_dict()["weight"]
    step(held)
    assert not torch.equal(tensor, weight_of(held)), "nobody has asked again"
    assert torch.equal(held.module.state_dict()["weight"], weight_of(held))
