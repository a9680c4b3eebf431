"""Tokens that may be drawn, how often each is, what ends a text, and that texts do not depend on each other."""

import math
import re

import numpy
import pytest
import torch

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.rollouts import Sampling
from pulsetrain.engine.rollouts.drawing import EndOfText, TokenDraws, end_tokens_of
from tests.support.models_language import refusal


def scores(rows=40, vocabulary=30, seed=0):
    return 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------- which tokens may be drawn


def kept_by_hand(row, sampling):
    """The tokens that remain, one filter after the other, in float64."""
    kept = list(range(len(row)))
    if sampling.top_k is not None:
        least = sorted(row, reverse=True)[min(sampling.top_k, len(row)) - 1]
        kept = [token for token in kept if row[token] >= least]

    def chances():
        weights = {token: math.exp(row[token]) for token in kept}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    if sampling.top_p < 1:
        found, together = [], 0.0
        for token, chance in sorted(chances().items(), key=lambda pair: -pair[1]):
            if together >= sampling.top_p:
                break
            found.append(token)
            together += chance
        kept = found
    if sampling.min_p:
        likely = chances()
        kept = [token for token in kept if likely[token] >= sampling.min_p * max(likely.values())]
    return set(kept)


FILTERS = [
    {}, {"top_k": 5}, {"top_k": 100}, {"top_p": 0.6}, {"top_p": 0.05}, {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_the_tokens_that_remain_are_those_of_the_definitions(options):
    sampling, given = Sampling(**options), scores()
    found = sampling.restrict(given)
    for before, after in zip(given.double().tolist(), found, strict=True):
        kept = kept_by_hand(before, sampling)
        assert {token for token, score in enumerate(after.tolist()) if score > -math.inf} == kept
        assert all(after[token].item() == pytest.approx(before[token]) for token in kept), "their scores stay"


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_the_tokens_that_remain_are_those_of_transformers(options):
    transformers = pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")
    warpers = transformers.LogitsProcessorList()
    for name, kind in (
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
    ):
        if name in options:
            warpers.append(kind(options[name]))
    given = scores(seed=1)
    expected = warpers(torch.zeros(len(given), 1, dtype=torch.int64), given.clone())
    torch.testing.assert_close(Sampling(**options).restrict(given), expected, rtol=0, atol=0)


def test_equally_likely_tokens_are_all_among_the_k_most_likely():
    found = Sampling(top_k=1).restrict(torch.tensor([[1.0, 2.0, 2.0, 0.0]]))
    assert found.isfinite().tolist() == [[False, True, True, False]]


def test_the_repetition_penalty_is_that_of_transformers_on_prompt_and_text():
    transformers = pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")
    prompts = [[1, 2, 2], [5]]
    draws = TokenDraws(prompts, 9, temperature=0.0, sampling=Sampling(repetition_penalty=1.7))
    logits = scores(2, 12)
    texts = [list(prompt) for prompt in prompts]
    for step in range(9):
        given = logits + 0.1 * step
        penalized = transformers.RepetitionPenaltyLogitsProcessor(1.7)
        pairs = zip(texts, given, strict=True)
        expected = [int(penalized(torch.tensor([text]), row[None].clone()).argmax()) for text, row in pairs]
        tokens, _ = draws([0, 1], given)
        assert tokens == expected
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
    assert len(set(texts[0])) > 4, "without the penalty it would always be the same"


# --------------------------------------------------------------------------------------------------- how often each is


def first_tokens(count, logits, **options):
    draws = TokenDraws([[0]] * count, 1, **options)
    tokens, ended = draws(list(range(count)), logits.expand(count, -1))
    assert all(ended)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]).double()


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.8, "min_p": 0.05}], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(options, temperature, seeded):
    torch.manual_seed(1)
    count, logits = 20000, scores(1, 12, seed=3)
    seeds = list(range(count)) if seeded else None
    counts = first_tokens(count, logits, temperature=temperature, sampling=Sampling(**options), seeds=seeds)
    expected = count * Sampling(**options).restrict(logits.double() / temperature).softmax(-1)[0]
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    assert freedom > 1
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


def test_a_token_without_probability_is_never_drawn_at_either_end():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    draws = TokenDraws([[0]] * 2, 1, seeds=[0, 1])
    draws._numbers = torch.tensor([[0.0], [1.0 - 2**-53]], dtype=torch.float64)
    assert draws([0, 1], logits.expand(2, -1))[0] == [1, 1]


def test_without_temperature_the_likeliest_token_is_taken_and_nothing_is_drawn():
    before = torch.get_rng_state()
    draws = TokenDraws([[0]] * 3, 2, temperature=0.0)
    logits = scores(3, 7)
    assert draws([0, 1, 2], logits)[0] == logits.argmax(-1).tolist()
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_texts_leave_the_generators_of_the_process_alone():
    before = torch.get_rng_state()
    TokenDraws([[0]] * 3, 5, seeds=[1, 2, 3])([0, 1, 2], scores(3, 7))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_text_does_not_depend_on_the_others_or_on_its_place():
    def alone(seed, row, length=6):
        draws = TokenDraws([[row]], length, seeds=[seed])
        for step in range(length):
            draws([0], scores(3, 9, seed=step)[row : row + 1])
        return draws.completions[0]

    expected = [alone(10 + row, row) for row in range(3)]
    draws = TokenDraws([[2], [0], [1]], 6, seeds=[12, 10, 11])
    running = [0, 1, 2]
    for step in range(6):
        draws(running, scores(3, 9, seed=step)[[(2, 0, 1)[row] for row in running]])
        if step == 2:
            running = [2, 0]  # one leaves, and the others change places
    assert draws.completions[0] == expected[2]
    assert draws.completions[2] == expected[1]
    assert draws.completions[1] == expected[0][:3]
    assert len({tuple(each) for each in expected}) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logits_without_a_distribution_are_refused_and_the_text_is_named(value, temperature):
    logits = torch.zeros(3, 4)
    logits[1] = value
    draws = TokenDraws([[0]] * 5, 2, temperature=temperature)
    with pytest.raises(ValueError, match=r"^TokenDraws: the logits of text 4, after 0 tokens, make no distribution"):
        draws([0, 4, 2], logits)


# ------------------------------------------------------------------------------------------------------ what ends texts


def test_each_of_several_tokens_ends_a_text():
    draws = TokenDraws([[0]] * 3, 5, temperature=0.0, end_token=[2, 4])
    likely = torch.eye(6)
    assert draws([0, 1, 2], likely[[2, 3, 4]])[1] == [True, False, True]


def text_of(tokens):
    return bytes(tokens).decode(errors="replace")


STOPS = [
    (["END"], b"some END", True),
    (["END"], b"some EN", False),
    (["a", "END"], b"b END", True),
    (["ä"], "fünf ä".encode(), True),
    (["ä"], "fünf ä".encode()[:-1], False),
    (["D\n"], b"END\nx", True),  # a token may hold more than the stop
    ([[1, 2, 3]], bytes([7, 1, 2, 3]), True),
    ([[1, 2, 3]], bytes([7, 1, 2]), False),
    ([[1, 2, 3], [9]], bytes([9]), True),
    ([[1, 2, 3]], bytes([1, 2, 3, 4]), False),
]


@pytest.mark.parametrize(("stops", "written", "over"), STOPS)
def test_a_text_ends_with_a_stop(stops, written, over):
    assert EndOfText((), Sampling(stop=stops, decode=text_of))(list(written)) is over


def test_a_stop_is_found_by_decoding_only_the_end_of_a_long_text():
    lengths = []

    def decode(tokens):
        lengths.append(len(tokens))
        return text_of(tokens)

    ended = EndOfText((), Sampling(stop=["END"], decode=decode))
    assert not ended([65] * 5000)
    assert ended([65] * 5000 + list(b"END"))
    assert max(lengths) < 30


def test_what_never_ends_a_text_is_known():
    assert EndOfText(()).never
    assert EndOfText((), Sampling(top_p=0.5)).never
    assert not EndOfText((0,)).never
    assert not EndOfText((), Sampling(stop=[[1]])).never


# ------------------------------------------------------------------------------------------------------------- refusals


WRONG = [
    ({"top_k": 0}, "Sampling(top_k=0): needs a whole number of at least 1"),
    ({"top_k": 2.5}, "Sampling(top_k=2.5): needs a whole number of at least 1"),
    ({"top_p": 0.0}, "Sampling(top_p=0.0): needs a positive number below 1"),
    ({"top_p": 1.5}, "Sampling(top_p=1.5): needs a positive number below 1"),
    ({"top_p": math.nan}, "Sampling(top_p=nan): needs a positive number below 1"),
    ({"min_p": 1.0}, "Sampling(min_p=1.0): needs a number of at least 0 and below 1"),
    ({"min_p": -0.1}, "Sampling(min_p=-0.1): needs a number of at least 0 and below 1"),
    ({"repetition_penalty": 0.0}, "Sampling(repetition_penalty=0.0): needs a positive number"),
    ({"stop": [""]}, "Sampling(stop=''): needs at least one character or token in each stop"),
    ({"stop": [[]]}, "Sampling(stop=[]): needs at least one character or token in each stop"),
    ({"stop": ["END"]}, "Sampling(stop=('END',)): texts are found in what decode= returns; pass the tokenizer's"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_options_out_of_range_are_refused(options, message):
    assert refusal(lambda: Sampling(**options)).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "END"}, "Sampling(stop='END'): needs a list of texts or of token sequences"),
        ({"stop": None}, "Sampling(stop=None): needs a list of texts or of token sequences"),
        ({"stop": [3]}, "Sampling(stop=3): needs a text or a sequence of token ids as each stop"),
        ({"stop": [[0.5]]}, "Sampling(stop=[0.5]): needs a text or a sequence of token ids"),
        ({"decode": 3}, "Sampling(decode=3): needs a function from token ids to text"),
    ],
)
def test_what_is_not_a_stop_is_refused(options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        Sampling(**options)


@pytest.mark.parametrize("given", [-1, True, 2.5, [3, -1], (True,), "x"])
def test_end_tokens_are_token_ids(given):
    with pytest.raises(ConfigurationError, match=r"Here\(end_token=.*needs a whole number of at least 0"):
        end_tokens_of("Here", given)


def test_a_list_of_end_tokens_is_not_empty():
    assert refusal(lambda: end_tokens_of("Here", [])).endswith("needs a token; pass None if none ends a text")


def test_a_stop_may_be_an_array_of_tokens():
    assert Sampling(stop=[numpy.array([1, 2])]).stop == ((1, 2),)


def test_a_decode_that_returns_no_text_is_named():
    ended = EndOfText((), Sampling(stop=["ab"], decode=lambda tokens: None))
    with pytest.raises(TypeError, match=r"^Sampling\(decode\): returned NoneType; needs a text$"):
        ended([1])
