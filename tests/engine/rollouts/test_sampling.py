"""Sampling from a model: tokens drawn by its probabilities, after prompts of any length, up to the end token."""

import itertools
import math

import pytest
import torch
from torch import nn

from pulsetrain.engine.rollouts import Sampling
from pulsetrain.engine.rollouts.drawing import TokenDraws
from pulsetrain.engine.rollouts.sampling import sampler_of
from tests.support.runs_strategies import language_model


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


def test_rows_whose_texts_have_ended_are_computed_no_further():
    model = Chain()
    found = sampler_of(model, lambda tokens: tokens)([[1]] * 200, 12, end_token=0, seeds=range(200))
    running = [sum(len(each) > step for each in found) for step in range(12)]
    assert [rows for rows, _ in model.shapes] == [rows for rows in running if rows]
    assert running[0] == 200 > running[-1]


@pytest.mark.parametrize("pad_to", [None, 14])
def test_a_text_does_not_depend_on_the_texts_that_are_drawn_with_it(pad_to):
    sampler = sampler_of(Chain(), lambda tokens: tokens, pad_token=1, pad_to=pad_to)
    prompts, seeds = [[1], [0, 1, 1], [1, 0], [0, 0]], [3, 4, 5, 6]
    together = sampler(prompts, 10, end_token=0, seeds=seeds)
    pairs = zip(prompts, seeds, strict=True)
    assert together == [sampler([each], 10, end_token=0, seeds=[seed])[0] for each, seed in pairs]
    assert together == sampler(prompts[::-1], 10, end_token=0, seeds=seeds[::-1])[::-1]
    assert sampler(prompts, 10, end_token=0, seeds=[7, 8, 9, 10]) != together


@pytest.mark.parametrize("sampling", [None, Sampling(top_k=1), Sampling(stop=[[1, 1]]), Sampling(min_p=0.9)])
def test_each_way_of_sampling_reaches_the_draws(sampling):
    found = sampler_of(Chain(), lambda tokens: tokens)([[1]] * 50, 6, sampling=sampling, seeds=range(50))
    expected = []
    for seed in range(50):
        draws, model = TokenDraws([[1]], 6, sampling=sampling, seeds=[seed]), Chain()
        over = [False]
        while not over[0]:
            _, over = draws([0], model(torch.tensor([[1, *draws.completions[0]]]))[:, -1])
        expected += draws.completions
    assert found == expected


def test_several_end_tokens_end_texts():
    found = sampler_of(Chain(), lambda tokens: tokens)([[1]] * 5, 12, end_token=[0, 1])
    assert [len(each) for each in found] == [1] * 5


class Writing(Chain):
    def sample(self, prompts, max_new_tokens, *, temperature, end_token):
        return [[max_new_tokens, temperature, end_token]] * len(prompts)


def test_a_models_own_sampler_is_used():
    assert sampler_of(Writing(), None)([[1], [0]], 7, temperature=0.5, end_token=4) == [[7, 0.5, 4]] * 2


class Drawing(Chain):
    """Draws its texts itself, with the choices of the sampler."""

    def sample(self, prompts, max_new_tokens, *, draw):
        rows, texts = list(range(len(prompts))), [list(prompt) for prompt in prompts]
        while rows:
            logits = torch.stack([self(torch.tensor([texts[row]]))[0, -1] for row in rows])
            tokens, ended = draw(rows, logits)
            for row, token in zip(rows, tokens, strict=True):
                texts[row].append(token)
            rows = [row for row, over in zip(rows, ended, strict=True) if not over]
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def test_a_model_that_draws_its_texts_itself_draws_the_same_ones():
    options = {"temperature": 0.7, "end_token": 0, "sampling": Sampling(stop=[[1, 1, 1]]), "seeds": [5, 6, 7]}
    prompts = [[1], [0, 1, 1], [1, 0]]
    found, expected = (sampler_of(each, lambda tokens: tokens)(prompts, 9, **options) for each in (Drawing(), Chain()))
    assert found == expected


def test_the_demos_model_draws_the_same_texts_with_its_cache_as_without():
    model = language_model()
    prompts, options = [[3, 4], [5], [6, 7, 8]], {"end_token": [0, 2], "seeds": [5, 6, 7]}
    found = sampler_of(model, None)(prompts, 12, **options)
    assert found == sampler_of(model.forward, lambda tokens: tokens)(prompts, 12, **options)
    assert len({len(each) for each in found}) > 1
