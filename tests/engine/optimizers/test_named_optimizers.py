"""Several optimizers as one: what the whole shows, and what each part does."""

import copy

import pytest
import torch
from torch import nn

from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.optimizers import MuonWithAdamW, NamedOptimizers, create_optimizer, parts_of


def modules():
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.Linear(2, 1)


def make(first, second):
    return NamedOptimizers(
        {
            "actor": torch.optim.AdamW(first.parameters(), lr=0.1),
            "critic": torch.optim.SGD(second.parameters(), lr=0.5, momentum=0.9),
        }
    )


def learn(first, second, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        second(first(torch.ones(4, 3) * (step + 1))).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in (*first.parameters(), *second.parameters())]


def test_a_step_of_the_whole_is_a_step_of_each():
    first, second = modules()
    whole = learn(first, second, make(first, second), 5)
    first, second = modules()
    adamw = torch.optim.AdamW(first.parameters(), lr=0.1)
    sgd = torch.optim.SGD(second.parameters(), lr=0.5, momentum=0.9)
    for step in range(5):
        adamw.zero_grad()
        sgd.zero_grad()
        second(first(torch.ones(4, 3) * (step + 1))).mean().backward()
        adamw.step()
        sgd.step()
    assert all(map(torch.equal, whole, (*first.parameters(), *second.parameters())))


def test_groups_and_state_are_those_of_the_parts():
    first, second = modules()
    whole = make(first, second)
    learn(first, second, whole, 1)
    assert [group["optimizer"] for group in whole.param_groups] == ["actor", "critic"]
    whole.param_groups[1]["lr"] = 0.25
    assert whole["critic"].param_groups[0]["lr"] == 0.25
    assert len(whole.state) == 4
    assert whole["actor"].state.keys() == set(first.parameters())
    assert list(whole) == list(whole.parts) == ["actor", "critic"]
    assert whole.name_of(whole["critic"]) == "critic"
    assert parts_of(whole) == whole.parts
    assert parts_of(whole["actor"]) == {"": whole["actor"]}


@pytest.mark.parametrize("optimizer", ["muon", "sgd", "adamw"])
def test_a_saved_state_resumes_bit_for_bit(optimizer):
    def begin():
        first, second = modules()
        parts = {"actor": create_optimizer(first, optimizer, 0.1), "critic": create_optimizer(second, "adam", 0.1)}
        return first, second, NamedOptimizers(parts)

    first, second, whole = begin()
    learn(first, second, whole, 3)
    saved = copy.deepcopy((first.state_dict(), second.state_dict(), whole.state_dict()))
    expected = learn(first, second, whole, 3)
    first, second, again = begin()
    first.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    again.load_state_dict(saved[2])
    assert all(map(torch.equal, learn(first, second, again, 3), expected))
    if optimizer == "muon":
        assert isinstance(again["actor"], MuonWithAdamW)


def test_a_group_that_is_added_later_says_whose_it_is():
    first, second = modules()
    whole, extra = make(first, second), nn.Parameter(torch.ones(2))
    whole.add_param_group({"params": [extra], "optimizer": "critic"})
    assert whole["critic"].param_groups[-1]["params"] == [extra]
    assert whole["critic"].param_groups[-1]["momentum"] == 0.9
    with pytest.raises(ConfigurationError, match=r"optimizer='judge'.*actor, critic"):
        whole.add_param_group({"params": [nn.Parameter(torch.ones(1))], "optimizer": "judge"})


def test_bad_input_is_refused():
    first, second = modules()
    with pytest.raises(ConfigurationError, match="needs at least 1 optimizer"):
        NamedOptimizers({})
    one, two = (torch.optim.SGD(first.parameters(), lr=1.0) for _ in range(2))
    with pytest.raises(ConfigurationError, match=r"'a' and 'b' share a parameter of shape \(2, 3\)"):
        NamedOptimizers({"a": one, "b": two})
    whole, other = make(first, second), modules()
    turned = NamedOptimizers(
        {"critic": torch.optim.SGD(other[1].parameters()), "actor": torch.optim.SGD(other[0].parameters())}
    )
    with pytest.raises(CheckpointError, match="in the order"):
        whole.check_state_dict(turned.state_dict())


def test_parts_keep_the_state_that_they_bring_and_are_saved_and_loaded_alone():
    first, second = modules()
    sgd = torch.optim.SGD(second.parameters(), lr=0.5, momentum=0.9)
    second(torch.ones(1, 2)).sum().backward()
    sgd.step()
    momentum = sgd.state[second.weight]["momentum_buffer"]
    whole = NamedOptimizers({"actor": torch.optim.AdamW(first.parameters()), "critic": sgd})
    assert whole["critic"].state[second.weight]["momentum_buffer"] is momentum
    assert whole.state[second.weight]["momentum_buffer"] is momentum
    saved = copy.deepcopy(whole["critic"].state_dict())
    assert len(saved["state"]) == 2
    whole["critic"].load_state_dict(saved)
    whole.param_groups[1]["lr"] = 0.125
    assert whole["critic"].param_groups[0]["lr"] == 0.125
    assert torch.equal(whole.state[second.weight]["momentum_buffer"], momentum)


def test_copies_are_complete_and_independent():
    first, second = modules()
    whole = make(first, second)
    learn(first, second, whole, 2)
    models, other = copy.deepcopy(((first, second), whole))
    assert other["critic"].param_groups[0]["params"][0] is models[1].weight
    before = first.weight.detach().clone()
    learn(*models, other, 1)
    assert torch.equal(first.weight, before)
    assert not torch.equal(models[0].weight, before)
