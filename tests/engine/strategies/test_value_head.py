"""A critic on top of a language model."""

import copy

import pytest
import torch
from torch import nn

from pulsetrain.engine import ConfigurationError
from pulsetrain.engine.strategies import WithValueHead
from pulsetrain.engine.strategies.value_head import PolicyOutputs


class Language(nn.Module):
    context = 17

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inner = nn.Embedding(7, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype)
        self.head = nn.Linear(4, 7, bias=False, dtype=dtype)
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens):
        return self.head(self.dropout(torch.tanh(self.inner(self.embedding(tokens)))))

    def sample(self, prompts, count):
        return [prompts, count]


TOKENS = torch.arange(6).reshape(2, 3)


def test_values_are_0_at_first_and_the_logits_the_models_own():
    model = Language().eval()
    found = WithValueHead(model, "head").eval()(TOKENS)
    assert isinstance(found, PolicyOutputs)
    assert torch.equal(found.logits, model(TOKENS))
    assert torch.equal(found.values, torch.zeros(2, 3))


def test_values_are_one_linear_layer_over_what_goes_into_the_head():
    model = Language().eval()
    wrapped = WithValueHead(model, "head").eval()
    with torch.no_grad():
        wrapped.value.weight.normal_()
        wrapped.value.bias.fill_(2.0)
    hidden = torch.tanh(model.inner(model.embedding(TOKENS)))
    expected = (hidden * wrapped.value.weight[0]).sum(-1) + 2.0
    torch.testing.assert_close(wrapped(TOKENS).values, expected)
    wrapped(TOKENS).values.sum().backward()
    assert model.inner.weight.grad.any(), "the critic teaches the model below the head, too"
    assert model.head.weight.grad is None
    assert not model.head._forward_pre_hooks


def test_values_are_in_float32_beside_a_model_in_bfloat16():
    wrapped = WithValueHead(Language(torch.bfloat16), "head")
    found = wrapped(TOKENS)
    assert (found.logits.dtype, found.values.dtype) == (torch.bfloat16, torch.float32)


def test_other_attributes_are_the_models():
    model = Language()
    wrapped = WithValueHead(model, "head")
    assert wrapped.context == 17
    assert wrapped.sample("prompts", 3) == ["prompts", 3]
    assert wrapped.embedding is model.embedding
    with pytest.raises(AttributeError, match="'Language' object has no attribute 'missing'"):
        wrapped.missing  # noqa: B018
    wrapped.eval()
    assert not model.dropout.training


def test_a_copy_is_independent():
    class Copied(Language):
        def __deepcopy__(self, memo):
            return Language()

    for kind in (Language, Copied):
        wrapped = WithValueHead(kind(), "head")
        other = copy.deepcopy(wrapped)
        assert type(other) is WithValueHead
        with torch.no_grad():
            wrapped.value.weight.fill_(1.0)
            wrapped.model.head.weight.fill_(1.0)
        assert not other.value.weight.any()
        assert not torch.equal(other.model.head.weight, wrapped.model.head.weight)
        assert other(TOKENS).values.shape == (2, 3)


def test_its_state_holds_both_and_loads_into_another_head():
    wrapped, other = WithValueHead(Language(), "head"), WithValueHead(Language(), "head")
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.normal_()
    state = wrapped.state_dict()
    assert set(state) == {"model.embedding.weight", "model.inner.weight", "model.inner.bias", "model.head.weight"} | {
        "value.weight",
        "value.bias",
    }
    other.load_state_dict(state)
    for each in (wrapped, other):
        each.eval()
    assert torch.equal(other(TOKENS).values, wrapped(TOKENS).values)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("lm_head", r"WithValueHead\(head='lm_head'\): Language has no such module; it has inner, head"),
        ("dropout", r"WithValueHead\(head='dropout'\): Dropout has no in_features; name the linear layer"),
        (None, r"WithValueHead\(head=None\): Language has no in_features; name the linear layer"),
    ],
)
def test_what_is_not_a_head_is_refused(head, message):
    with pytest.raises(ConfigurationError, match=message):
        WithValueHead(Language(), head)
