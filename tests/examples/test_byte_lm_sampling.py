"""ByteGPT.sample of examples/byte_lm: a batch of prompts with a cache gives the texts of each prompt without one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.byte_lm.model import ByteGPT, Cache

pytestmark = pytest.mark.slow

CONTEXT = 24
PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7], [200, 100], [7] * 7, list(range(40, 60)), [0, 0, 0], [1, 2, 3, 4, 5, 6, 8]]


def small_model(**changes: Any) -> ByteGPT:
    """A model whose weights are ten times the first ones: what it writes depends on all that it has read."""
    torch.manual_seed(0)
    model = ByteGPT(**{"layers": 2, "width": 32, "heads": 2, "context": CONTEXT, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0 if parameter.dim() == 2 else 1.0)
    return model


@pytest.fixture
def model() -> ByteGPT:
    return small_model()


@torch.no_grad()
def likeliest(model: ByteGPT, prompt: list[int], max_new_tokens: int, end_token: int | None = None) -> list[int]:
    """The loop without a cache: the whole text is read again for each token."""
    text = list(prompt)
    while len(text) < len(prompt) + max_new_tokens and len(text) <= model.context:
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        if text[-1] == end_token:
            break
    return text[len(prompt) :]


@contextmanager
def recorded_logits(model: ByteGPT) -> Iterator[list[Tensor]]:
    """The model's logits of the last column, for each call."""
    logits: list[Tensor] = []
    handle = model.register_forward_hook(lambda module, inputs, output: logits.append(output[:, -1]))
    try:
        yield logits
    finally:
        handle.remove()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class TestLikeliestTokens:
    def test_a_cache_does_not_change_the_likeliest_tokens(self, model: ByteGPT) -> None:
        replies = model.sample(PROMPTS, 12, temperature=0.0)
        assert replies == [likeliest(model, prompt, 12) for prompt in PROMPTS]
        assert len({tuple(reply) for reply in replies}) == len(PROMPTS)  # the texts depend on their prompts

    def test_a_row_does_not_depend_on_the_other_rows(self, model: ByteGPT) -> None:
        together = model.sample(PROMPTS, 12, temperature=0.0)
        assert [model.sample([prompt], 12, temperature=0.0)[0] for prompt in PROMPTS] == together
        assert model.sample(PROMPTS[::-1], 12, temperature=0.0) == together[::-1]

    def test_a_row_ends_after_its_end_token_and_the_others_continue(self, model: ByteGPT) -> None:
        without = model.sample(PROMPTS, 12, temperature=0.0)
        end_token = without[1][3]
        replies = model.sample(PROMPTS, 12, temperature=0.0, end_token=end_token)
        assert replies == [likeliest(model, prompt, 12, end_token) for prompt in PROMPTS]
        assert replies[1] == without[1][: without[1].index(end_token) + 1]
        assert any(end_token not in reply and len(reply) > len(replies[1]) for reply in replies)

    def test_a_row_ends_when_its_tokens_fill_the_context(self, model: ByteGPT) -> None:
        prompts = [*PROMPTS, [5] * (CONTEXT - 1), [5] * CONTEXT]
        replies = model.sample(prompts, 100, temperature=0.0)
        assert [len(prompt) + len(reply) - 1 for prompt, reply in zip(prompts, replies, strict=True)] == [CONTEXT] * 9
        assert replies == [likeliest(model, prompt, 100) for prompt in prompts]

    def test_dropout_is_off_while_sampling(self) -> None:
        model = small_model(dropout=0.5).train()
        assert model.sample(PROMPTS, 12, temperature=0.0) == small_model().sample(PROMPTS, 12, temperature=0.0)

    def test_bytes_are_a_prompt_too(self, model: ByteGPT) -> None:
        assert model.sample([b"def "], 5, temperature=0.0) == [likeliest(model, list(b"def "), 5)]


class TestDraws:
    def test_draws_use_the_same_logits_as_without_a_cache(self, model: ByteGPT) -> None:
        with recorded_logits(model) as columns:
            replies = model.sample(PROMPTS, 4, generator=generator())  # all rows continue to the end
        cached = torch.stack(columns, dim=1)  # (rows, new tokens, vocabulary)
        assert cached.shape == (len(PROMPTS), 4, 256)
        with torch.no_grad():
            for prompt, reply, logits in zip(PROMPTS, replies, cached, strict=True):
                expected = model(torch.tensor([prompt + reply[:-1]]))[0, len(prompt) - 1 :]
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_draws_have_the_models_frequencies(self, temperature: float) -> None:
        model, prompt, rows, tokens = small_model(vocabulary=5), [1, 4, 2], 8000, 5
        replies = torch.tensor(model.sample([prompt] * rows, 2, temperature=temperature, generator=generator()))
        counts = torch.bincount(replies[:, 0] * tokens + replies[:, 1], minlength=tokens**2).double()
        with torch.no_grad():
            texts = torch.tensor([[*prompt, first] for first in range(tokens)])
            likely = (model(texts)[:, -2:].double() / temperature).softmax(-1)
        expected = rows * (likely[0, 0][:, None] * likely[:, 1]).flatten()  # of each pair, first and second token
        common = expected >= 5  # rare pairs count as one, as the chi-square distribution wants it
        if not common.all():
            counts = torch.cat((counts[common], counts[~common].sum()[None]))
            expected = torch.cat((expected[common], expected[~common].sum()[None]))
        chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), torch.tensor(len(counts) - 1.0)
        assert freedom >= 8
        p_value = torch.special.gammaincc(freedom.double() / 2, chi_square / 2)
        assert p_value > 1e-3

    def test_a_generator_decides_the_draws(self, model: ByteGPT) -> None:
        first, again, other = (model.sample(PROMPTS, 12, generator=generator(seed)) for seed in (1, 1, 2))
        assert first == again != other

    def test_without_a_generator_torchs_own_decides(self, model: ByteGPT) -> None:
        samples = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            samples.append(model.sample(PROMPTS, 12))
        assert samples[0] == samples[1] != samples[2]
        state = torch.get_rng_state()
        model.sample(PROMPTS, 12, generator=generator())
        model.sample(PROMPTS, 12, temperature=0.0)
        assert torch.equal(torch.get_rng_state(), state)

    def test_draws_cover_the_whole_vocabulary(self) -> None:
        replies = ByteGPT(layers=1, width=8, heads=1, context=64, vocabulary=300).sample([[299]] * 20, 60)
        assert max(max(reply) for reply in replies) > 255


class TestCalls:
    def test_without_prompts_or_tokens_nothing_is_generated(self, model: ByteGPT) -> None:
        with recorded_logits(model) as columns:
            assert model.sample([], 5) == []
            assert model.sample([[1], [2, 3]], 0) == [[], []]
        assert columns == []

    def test_each_token_is_read_once(self, model: ByteGPT) -> None:
        read: list[tuple[int, ...]] = []
        model.embedding.register_forward_hook(lambda module, inputs, output: read.append(tuple(inputs[0].shape)))
        model.sample([[1, 2, 3], [4]], 4)
        assert read == [(2, 3), (2, 1), (2, 1), (2, 1)]

    def test_finished_rows_are_not_read_again(self, model: ByteGPT) -> None:
        with recorded_logits(model) as columns:
            model.sample([[1] * (CONTEXT - 2), [1], [1] * CONTEXT], 5)
        assert [len(logits) for logits in columns] == [3, 2, 2, 1, 1]

    @pytest.mark.parametrize("training", [True, False])
    def test_the_models_mode_is_restored(self, model: ByteGPT, training: bool) -> None:
        modes: list[bool] = []
        model.register_forward_hook(lambda module, inputs, output: modes.append(module.training))
        model.train(training).sample([[1]], 2)
        assert model.training is training
        assert modes == [False, False]

    def test_the_models_mode_is_restored_after_an_error(self, model: ByteGPT) -> None:
        def fail(module: object, inputs: object, output: object) -> None:
            raise RuntimeError("out of memory")

        model.train().register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.sample([[1]], 2)
        assert model.training

    def test_no_graph_is_kept(self, model: ByteGPT) -> None:
        with recorded_logits(model) as columns:
            model.sample([[1]], 3)
        assert not any(logits.requires_grad for logits in columns)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_other_precisions_work(self, model: ByteGPT, dtype: torch.dtype) -> None:
        assert [len(reply) for reply in model.to(dtype).sample(PROMPTS, 4)] == [4] * len(PROMPTS)

    def test_autocast_works(self, model: ByteGPT) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert [len(reply) for reply in model.sample(PROMPTS, 4)] == [4] * len(PROMPTS)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"prompts": [[1], []]}, rf"prompts\[1\] of 0 tokens.*needs 1 to {CONTEXT}"),
            ({"prompts": [[1] * (CONTEXT + 1)]}, rf"prompts\[0\] of {CONTEXT + 1} tokens.*needs 1 to {CONTEXT}"),
            ({"prompts": [[1], [2, 256]]}, r"prompts\[1\] of 2 tokens, unknown among them \[256\].*below 256"),
            ({"prompts": [[-1]]}, r"unknown among them \[-1\]"),
            ({"max_new_tokens": -1}, "max_new_tokens=-1.*must not be negative"),
            ({"temperature": -0.5}, "temperature=-0.5"),
            ({"temperature": math.nan}, "temperature=nan"),
            ({"end_token": 256}, r"end_token=256\): needs one of the 256 tokens"),
            ({"end_token": -1}, r"end_token=-1\)"),
        ],
    )
    def test_bad_arguments_are_refused(self, model: ByteGPT, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            model.sample(**{"prompts": [[1]], "max_new_tokens": 1, **arguments})

    def test_a_cache_needs_positions(self, model: ByteGPT) -> None:
        cache = Cache(rows=1, columns=2, device=torch.device("cpu"))
        with pytest.raises(ValueError, match=r"position_ids of shape None\): needs \(1, 2\), as input_ids"):
            model(torch.tensor([[1, 2]]), cache=cache)

    def test_a_function_chooses_the_tokens_and_ends_the_rows(self, model: ByteGPT) -> None:
        asked: list[list[int]] = []

        def draw(rows: list[int], logits: Tensor) -> tuple[list[int], list[bool]]:
            asked.append(list(rows))
            assert logits.shape == (len(rows), 256)
            return [10 * row + len(asked) for row in rows], [row < len(asked) for row in rows]

        replies = model.sample([[1, 2], [3], [4, 5, 6]], 9, draw=draw)
        assert asked == [[0, 1, 2], [1, 2], [2]]
        assert replies == [[1], [11, 12], [21, 22, 23]]
        full = model.sample([[1] * CONTEXT], 9, draw=lambda rows, logits: ([7], [False]))
        assert full == [[7]], "the context is full"
