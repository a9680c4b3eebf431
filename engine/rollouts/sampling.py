"""Samplers that draw texts from a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.model_call import call
from pulsetrain.engine.strategies.language import logits_of

__all__ = ["Sampler", "sampler_of"]

Sampler = Callable[..., list[list[int]]]
"""`sampler(prompts, max_new_tokens, temperature=..., end_token=...)`: the completion of each prompt, as token ids."""


def sampler_of(
    model: Callable[..., object],
    inputs_of: Callable[[Tensor], object],
    device: torch.device | str = "cpu",
    pad_token: int = 0,
    pad_to: int | None = None,
    agree: Callable[[bool], bool] | None = None,
) -> Sampler:
    """The sampler for a model: its own `sample`, Hugging Face's `generate`, or a loop over tokens.

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
            any of them. A process whose texts have ended computes with the others until all have.

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
        return sampler
    if callable(getattr(model, "generate", None)) and hasattr(model, "generation_config"):
        return partial(_generated, model, device, pad_token, agree is not None)

    def logits_for(tokens: Tensor) -> Array:
        return logits_of(call(model, inputs_of(tokens.to(device))))

    return partial(_token_by_token, logits_for, pad_token, pad_to, agree or bool)


# Some models have their own generation settings, and the default keeps only the 50 most likely tokens. Either would
# draw from a different distribution than the one whose log-probabilities are trained.
_PLAIN: dict[str, Any] = {
    "do_sample": True,
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "guidance_scale": None,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "watermarking_config", "renormalize_logits"), None),
    "min_length": 0,
    "min_new_tokens": None,
    "max_time": None,
    "stop_strings": None,
    "remove_invalid_values": False,
    "token_healing": False,
}


def _generated(
    model: Any,
    device: torch.device | str,
    pad_token: int,
    in_step: bool,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    end_token: int | None = None,
) -> list[list[int]]:
    """Hugging Face's `generate`, configured to draw from the model's own distribution."""
    length = max(map(len, prompts))
    rows = [[pad_token] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    seen = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    known = vars(model.generation_config)
    options = {name: value for name, value in _PLAIN.items() if name in known}
    options |= {"temperature": temperature} if temperature else {"do_sample": False}
    found = model.generate(
        input_ids=torch.tensor(rows, device=device),
        attention_mask=torch.tensor(seen, device=device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad_token,
        eos_token_id=end_token,
        synced_gpus=in_step,
        **options,
    )
    return [_until(row, end_token) for row in found[:, length:].tolist()]


def _token_by_token(
    logits_for: Callable[[Tensor], Array],
    pad_token: int,
    pad_to: int | None,
    continues: Callable[[bool], bool],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    end_token: int | None = None,
) -> list[list[int]]:
    """Calls the model on the whole text for each token; for models without a cache."""
    longest = max(map(len, prompts)) + max_new_tokens
    texts = torch.full((len(prompts), max(longest, pad_to or 0)), pad_token)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    for row, prompt in zip(texts, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    running = torch.ones(len(prompts), dtype=torch.bool)
    ends = lengths + max_new_tokens
    everyone = torch.arange(len(prompts))
    while continues(bool(running.any())):
        # with a fixed length, leave out the last position as in training: one shape less to compile for
        logits = logits_for(texts[:, : int(lengths.max()) if pad_to is None else -1])
        last = logits[everyone.to(logits.device), (lengths - 1).to(logits.device)].float() / temperature
        drawn = torch.multinomial(last.softmax(-1), 1).squeeze(-1).cpu()
        texts[everyone[running], lengths[running]] = drawn[running]
        lengths = lengths + running
        running = running & (lengths < ends)
        if end_token is not None:
            running = running & (drawn != end_token)
    return [
        text[len(prompt) : length].tolist()
        for text, prompt, length in zip(texts, prompts, lengths.tolist(), strict=True)
    ]


def _until(tokens: list[int], end_token: int | None) -> list[int]:
    """The tokens up to and including the end token."""
    return tokens[: tokens.index(end_token) + 1] if end_token in tokens else tokens
