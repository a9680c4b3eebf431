"""Samplers that draw texts from a language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.rollouts.completions import Completion
from pulsetrain.engine.rollouts.drawing import TokenDraws
from pulsetrain.engine.step.model_call import call
from pulsetrain.engine.strategies.language import logits_of

__all__ = ["Sampler", "sampler_of", "takes"]

Sampler = Callable[..., Sequence[Any]]
"""`sampler(prompts, max_new_tokens, temperature=..., end_token=...)`: the completion of each prompt, as token ids.

`end_token` is a token, a tuple of several, or None. A sampler that takes `sampling` or `seeds` also gets a `Sampling`
or None, and a seed for each text. One that draws from a different model returns a `Completion` for each prompt.
"""


def sampler_of(
    model: Callable[..., object],
    inputs_of: Callable[[Tensor], object],
    device: torch.device | str = "cpu",
    pad_token: int = 0,
    pad_to: int | None = None,
    agree: Callable[[bool], bool] | None = None,
) -> Sampler:
    """The sampler for a model: its own `sample`, or a loop over tokens, with the cache of a Hugging Face model.

    A text that has ended is computed no further: its row leaves the batch, unless `pad_to` fixes the shapes.

    >>> def count(tokens):  # predicts the next number
    ...     return torch.nn.functional.one_hot((tokens + 1) % 10, 10) * 100.0
    >>> sampler_of(count, inputs_of=lambda tokens: tokens)([[3], [5, 6]], max_new_tokens=3, end_token=8)
    [[4, 5, 6], [7, 8]]

    Args:
        inputs_of: maps tokens of shape (batch, length) to the model's inputs.
        device: the model's device.
        pad_token: fills the unused positions of a row.
        pad_to: a fixed length for all calls of the model; None uses the length needed.
        agree: of a model that is sharded, which all processes have to call equally often: whether a value is true in
            any of them. A process whose texts have ended computes with the others until all have. A sharded
            `WithValueHead` computes without a cache.

    Raises:
        ConfigurationError: the model is sharded, and draws its texts itself.
    """
    own = getattr(model, "sample", None)
    if callable(own):
        if agree is not None:
            raise ConfigurationError(
                "its sample() may call the model more often in one process than in another, which would wait for ever; "
                "leave the model whole in each process, or pass TextRollouts(sampler=...)",
                "TextRollouts",
                model=type(model),
            )
        sampler: Sampler = own
        return partial(_drawn_by_model, own) if takes(own, "draw", by_name=True) else sampler
    cached = _caching(model)
    # of a sharded model only itself gathers all weights when it is called, not the language model inside it
    if cached is not None and (agree is None or cached[0] is model):
        return partial(_token_by_token, partial(_Cached, *cached, device, pad_token), agree or bool)

    def logits_for(tokens: Tensor) -> Array:
        return logits_of(call(model, inputs_of(tokens.to(device))))

    return partial(_token_by_token, partial(_Recomputed, logits_for, pad_token, pad_to), agree or bool)


def takes(function: Callable[..., object], name: str, *, by_name: bool = False) -> bool:
    """Whether a function accepts a keyword argument.

    >>> takes(sorted, "reverse"), takes(sorted, "seeds"), takes(lambda **options: 0, "seeds")
    (True, False, True)

    Args:
        by_name: whether it has to name the argument, so that `**options` is not enough.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function that is not written in Python
        return False
    return any(each.name == name or (each.kind == each.VAR_KEYWORD and not by_name) for each in parameters)


def _caching(model: Any) -> tuple[Callable[..., object], frozenset[str]] | None:
    """The part of a Hugging Face model that keeps keys and values, and the keywords of its forward; None otherwise."""
    if not callable(getattr(model, "generate", None)) or not hasattr(model, "generation_config"):
        return None
    # of WithValueHead, which computes what is not needed here, the language model
    writer = getattr(model.generate, "__self__", model)
    inner = writer.get_base_model() if hasattr(writer, "get_base_model") else writer  # inside adapters
    keywords = frozenset(inspect.signature(inner.forward).parameters)
    return (writer, keywords) if {"past_key_values", "attention_mask"} <= keywords else None


def _drawn_by_model(
    sample: Callable[..., list[list[int]]],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    **options: Any,  # of `TokenDraws`
) -> Sequence[Any]:
    """The model's own `sample(prompts, max_new_tokens, draw=...)`."""
    draws = TokenDraws(prompts, max_new_tokens, **options)
    texts = sample(prompts, max_new_tokens, draw=draws)
    return texts if draws.log_probs is None else list(map(Completion, texts, draws.log_probs))


class _Reader(Protocol):
    """Computes the logits of the next tokens of texts that have not ended."""

    def logits(self) -> Array:
        """Shape (texts, vocabulary)."""

    def extend(self, tokens: list[int], kept: list[int]) -> None:
        """Continues with these of the texts alone, by their places, and a token for each."""

    def idle(self) -> None:
        """Calls the model without texts, while other processes compute theirs."""


def _token_by_token(
    reader_of: Callable[[Sequence[Sequence[int]], int], _Reader],
    continues: Callable[[bool], bool],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    **options: Any,  # of `TokenDraws`
) -> Sequence[Any]:
    """Calls the model once per token."""
    draws = TokenDraws(prompts, max_new_tokens, **options)
    reader, rows = reader_of(prompts, max_new_tokens), list(range(len(prompts)))
    while continues(bool(rows)):
        if not rows:
            reader.idle()
            continue
        tokens, ended = draws(rows, reader.logits())
        kept = [place for place, over in enumerate(ended) if not over]
        rows = [rows[place] for place in kept]
        if rows:
            reader.extend([tokens[place] for place in kept], kept)
    return draws.completions if draws.log_probs is None else list(map(Completion, draws.completions, draws.log_probs))


class _Recomputed:
    """Computes each text from its first token for every new one: for models without a cache."""

    def __init__(
        self,
        logits_for: Callable[[Tensor], Array],
        pad_token: int,
        pad_to: int | None,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
    ) -> None:
        self._logits_for, self._pad_token, self._pad_to = logits_for, pad_token, pad_to
        longest = max(map(len, prompts), default=1) + max_new_tokens
        self._texts = torch.full((len(prompts), max(longest, pad_to or 0)), pad_token)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
        for row, prompt in zip(self._texts, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        self._rows = torch.arange(len(prompts))

    def logits(self) -> Array:
        last = self._lengths[self._rows] - 1
        if self._pad_to is None:
            found = self._logits_for(self._texts[self._rows, : int(last.max()) + 1])
            places = torch.arange(len(last))
        else:  # always all rows, and in training the last position is left out, too: one shape to compile for
            found, places = self._logits_for(self._texts[:, :-1]), self._rows
        return found[places.to(found.device), last.to(found.device)]

    def extend(self, tokens: list[int], kept: list[int]) -> None:
        self._rows = self._rows[kept]
        self._texts[self._rows, self._lengths[self._rows]] = torch.tensor(tokens)
        self._lengths[self._rows] += 1

    def idle(self) -> None:
        length = 1 if self._pad_to is None else self._pad_to - 1
        self._logits_for(torch.full((1, length), self._pad_token))


class _Cached:
    """Keeps the keys and values of the tokens read so far in a Hugging Face model's own cache.

    Prompts are padded on the left, so that all texts grow in the same column.
    """

    def __init__(
        self,
        model: Callable[..., object],
        keywords: frozenset[str],
        device: torch.device | str,
        pad_token: int,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
    ) -> None:
        self._model, self._keywords, self._device, self._pad_token = model, keywords, device, pad_token
        length = max(map(len, prompts), default=1)
        padding = [length - len(prompt) for prompt in prompts]
        rows = [[pad_token] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
        self._tokens = torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, length)
        place = torch.arange(length, device=device)
        begun = torch.tensor(padding, dtype=torch.int64, device=device).unsqueeze(-1)
        # 0 for padding. Without any, the model need not find out by waiting for the device that there is none
        self._seen = (place >= begun).long() if any(padding) else None
        self._positions = (place - begun).clamp(min=0)
        self._cache: Any = None

    def logits(self) -> Array:
        given: dict[str, Any] = {"input_ids": self._tokens, "use_cache": True}
        if self._cache is not None:
            given["past_key_values"] = self._cache
        if self._seen is not None:
            given["attention_mask"] = self._seen
        if "position_ids" in self._keywords:
            given["position_ids"] = self._positions
        if "logits_to_keep" in self._keywords:
            given["logits_to_keep"] = 1  # not of all tokens of a prompt
        outputs: Any = self._model(**given)
        self._cache = getattr(outputs, "past_key_values", None)
        if self._cache is None:
            raise TypeError(
                f"TextRollouts: {type(self._model).__name__} returned no past_key_values, by which the next token "
                "would be computed; pass TextRollouts(sampler=...)"
            )
        return logits_of(outputs)[:, -1]

    def extend(self, tokens: list[int], kept: list[int]) -> None:
        if len(kept) < len(self._tokens):
            rows = torch.tensor(kept, device=self._device)
            self._cache.reorder_cache(rows)  # selects rows, in the states of recurrent layers, too
            self._positions = self._positions[rows]
            self._seen = None if self._seen is None else self._seen[rows]
        self._tokens = torch.tensor(tokens, device=self._device).unsqueeze(-1)
        if self._seen is not None:
            self._seen = torch.cat([self._seen, self._seen.new_ones(len(tokens), 1)], dim=1)
        self._positions = self._positions[:, -1:] + 1

    def idle(self) -> None:
        self._model(input_ids=torch.full((1, 1), self._pad_token, device=self._device), use_cache=False)
