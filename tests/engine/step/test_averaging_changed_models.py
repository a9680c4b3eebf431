"""Averages of a model whose tensors are replaced: which are read once, and which again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step import averaging
from pulsetrain.engine.step.averaging import WeightAverage
from tests.support.models_averaged import RULES, Mixed, averaged, same, snapshot, train


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mixed()


def reads(monkeypatch):
    """How often the model is walked through, from now on."""
    walks = []
    original = averaging._split
    monkeypatch.setattr(averaging, "_split", lambda model: walks.append(model) or original(model))
    return walks


@pytest.mark.parametrize("rule", list(RULES))
def test_a_model_that_stays_is_read_once_and_its_averages_stay_in_their_tensors(rule, model, monkeypatch):
    walks = reads(monkeypatch)
    average = WeightAverage(model, RULES[rule])
    average.update()
    places = {name: tensor.data_ptr() for name, tensor in average._weights.items()}
    for _ in range(5):
        train(model)
        average.update()
    assert len(walks) == 1
    assert {name: tensor.data_ptr() for name, tensor in average._weights.items()} == places


def other_parameter(model):
    model.first.bias = nn.Parameter(torch.full((4,), 2.0))


def other_data(model):
    model.first.bias.data = torch.full((4,), 2.0)


def other_buffer(model):
    model.norm.running_mean = torch.full((4,), 2.0)


def other_module(model):
    model.norm = copy.deepcopy(model.norm)
    nn.init.constant_(model.norm.bias, 2.0)


@pytest.mark.parametrize("change", [other_parameter, other_data, other_buffer, other_module])
def test_what_is_put_in_the_place_of_a_tensor_is_averaged_from_then_on(change, model):
    theirs = AveragedModel(model, multi_avg_fn=RULES["ema"])
    mine = WeightAverage(model, RULES["ema"])
    for number in range(6):
        train(model)
        if number == 3:
            change(model)
        theirs.update_parameters(model)
        mine.update()
    with mine.applied():
        assert same(snapshot(model), theirs.module.state_dict())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda model: model.bfloat16(), r"dtype: bias is \(2,\) float32 in the average, \(2,\) bfloat16 in the model"),
        (lambda model: setattr(model.bias, "data", torch.ones(1)), r"shape: bias is \(2,\) float32 .*, \(1,\) float32"),
        (lambda model: model.register_parameter("gain", nn.Parameter(torch.ones(1))), r"missing: gain \(1,\) float32"),
        (lambda model: model.register_parameter("bias", None), r"unexpected: bias \(2,\) float32"),
        (lambda model: model.add_module("more", nn.Linear(1, 1, bias=False)), r"missing: more.weight \(1, 1\) float32"),
    ],
)
def test_parameters_that_cannot_be_averaged_any_more_are_noticed_at_the_next_update(change, problem):
    model = nn.Linear(2, 2)
    average = WeightAverage(model, RULES["ema"])
    average.update()
    average.update()
    before = average.state_dict()["weights"]
    change(model)
    with pytest.raises(ConfigurationError, match=rf"update\(\): the model has changed: .*{problem}"):
        average.update()
    assert same(average.state_dict()["weights"], before)


def test_a_buffer_added_later_is_copied_and_one_of_another_shape_too(model):
    average = averaged(model)
    model.register_buffer("seen", torch.ones(3))
    model.norm.register_buffer("running_mean", torch.full((7,), 5.0))
    average.update()
    weights = average.state_dict()["weights"]
    assert weights["seen"].tolist() == [1.0] * 3
    assert weights["norm.running_mean"].tolist() == [5.0] * 7


def test_an_average_continues_after_a_loaded_state_and_kept_buffers(model):
    average = averaged(model)
    state = average.state_dict()
    with average.applied():
        model.norm.running_mean.fill_(7.0)
        average.keep_buffers()
    average.update()
    assert torch.equal(average.state_dict()["weights"]["norm.running_mean"], model.norm.running_mean)
    average.load_state_dict(state)
    other = WeightAverage(model, RULES["ema"])
    other.load_state_dict(state)
    for one in (average, other):
        one.update()
    assert same(average.state_dict()["weights"], other.state_dict()["weights"])
