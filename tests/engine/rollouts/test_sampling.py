"""Sampling from a model: tokens drawn by its probabilities, after prompts of any length, up to the end token."""

import itertools
import math

import pytest
import torch
from torch import nn

from pulsetrain.engine.rollouts.sampling import sampler_of


class Chain(nn.Module):
    """Predicts the next token of two by the sum of the tokens so far: padding or a truncated text gives an error."""

    def __init__(self, context=None):
        super().__init__()
        self.shapes, self.context = [], context

    def forward(self, tokens):
        self.shapes.append(tuple(tokens.shape))
        assert self.context is None or tokens.shape[1] <= self.context
        total = tokens.cumsum(1)
        return torch.stack([torch.zeros(tokens.shape), torch.sin(3.0 * total + 1)], dim=-1)


def probabilities(prompt, length, temperature=1.0, end=None):
    """Of each text that can follow."""
    found = {}
    for tokens in itertools.product((0, 1), repeat=length):
        text, chance = [], 1.0
        for token in tokens:
            one = 1 / (1 + math.exp(-math.sin(3.0 * (sum(prompt) + sum(text)) + 1) / temperature))
            text.append(token)
            chance *= one if token else 1 - one
            if token == end:
                break
        found[tuple(text)] = chance  # the same for all that begin with the end
    return found


def assert_drawn_by(texts, expected):
    """Pearson's statistic is within 5 standard deviations of its mean, and no other text came."""
    counts = dict.fromkeys(expected, 0)
    for text in texts:
        counts[tuple(text)] += 1
    statistic = sum((counts[text] - len(texts) * p) ** 2 / (len(texts) * p) for text, p in expected.items())
    freedom = len(expected) - 1
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("pad_to", [None, 6, 11])
@pytest.mark.parametrize("end", [None, 0])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_texts_have_the_product_of_their_tokens_probabilities(temperature, end, pad_to):
    prompts = [[1], [0, 1, 1]]
    expected = [probabilities(prompt, 3, temperature, end) for prompt in prompts]
    assert all(math.isclose(sum(each.values()), 1.0) for each in expected)
    torch.manual_seed(0)
    model = Chain()
    sampler = sampler_of(model, lambda tokens: tokens, pad_token=1, pad_to=pad_to)
    found = sampler(prompts * 3000, 3, temperature=temperature, end_token=end)
    for number in range(2):
        assert_drawn_by(found[number::2], expected[number])
    assert len(set(model.shapes)) == (3 if pad_to is None else 1), "one shape to compile for"
    if pad_to is not None:
        assert model.shapes[0] == (6000, pad_to - 1), "what nothing follows is not asked for"


def test_the_longest_text_fits_a_model_whose_context_lacks_its_last_token():
    found = sampler_of(Chain(context=5), lambda tokens: tokens)([[1, 1], [0]], 4)
    assert [len(each) for each in found] == [4, 4]


def test_a_text_that_has_ended_stays_as_it_is_while_others_continue():
    torch.manual_seed(1)
    found = sampler_of(Chain(), lambda tokens: tokens)([[1]] * 200, 12, end_token=0)
    assert all(0 not in each[:-1] and (each[-1] == 0 or len(each) == 12) for each in found)
    assert len({len(each) for each in found}) > 4


def test_a_models_own_sampler_is_used():
    class Writing(Chain):
        def sample(self, prompts, max_new_tokens, *, temperature, end_token):
            return [[max_new_tokens, temperature, end_token]] * len(prompts)

    assert sampler_of(Writing(), None)([[1], [0]], 7, temperature=0.5, end_token=4) == [[7, 0.5, 4]] * 2
