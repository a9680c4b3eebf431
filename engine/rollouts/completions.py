"""What follows a prompt: its tokens, which of them the policy wrote, and how likely the sampler found those."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.data.sequences import IGNORED

__all__ = ["Completion", "check_completions", "importance_weights"]


@dataclass(frozen=True)
class Completion:
    """The text after a prompt.

    >>> Completion([5, 6, 7], written=[True, False, True]).after([1])
    {'input_ids': [1, 5, 6, 7], 'labels': [-100, 5, -100, 7]}

    Args:
        tokens: all that follows the prompt.
        log_probs: of a sampler that is not the policy: the log-probability with which it drew each token, nats, for
            the tokens that were written; None if the policy itself drew them.
        written: which tokens the policy wrote, and is trained on; None if it wrote all.
    """

    tokens: list[int]
    log_probs: list[float] | None = None
    written: list[bool] | None = None

    @property
    def length(self) -> int:
        """The number of tokens that were written."""
        return len(self.tokens) if self.written is None else sum(self.written)

    def after(self, prompt: Sequence[int]) -> dict[str, list[int]]:
        """The example for `pulsetrain.engine.data.sequences`."""
        labels = self.tokens
        if self.written is not None:
            labels = [token if own else IGNORED for token, own in zip(self.tokens, self.written, strict=True)]
        return {"input_ids": [*prompt, *self.tokens], "labels": [IGNORED] * len(prompt) + labels}


def check_completions(place: str, found: object, count: int, most: int) -> list[Completion]:
    """What a sampler returned, as completions.

    >>> check_completions("TextRollouts", [[1, 2], [3]], count=2, most=2)[1].tokens
    [3]

    Args:
        count: the number of prompts.
        most: the largest number of tokens of each.

    Raises:
        TypeError: not a list of token ids for each prompt.
        ValueError: too few or too many, or log-probabilities that do not belong to the tokens.
    """
    try:
        listed: list[Any] = list(found)  # type: ignore[call-overload]
        given = [each if isinstance(each, Completion) else Completion(each) for each in listed]
        texts = [
            Completion(
                [operator.index(token) for token in each.tokens],
                None if each.log_probs is None else [float(value) for value in each.log_probs],
            )
            for each in given
        ]
    except (TypeError, ValueError):
        raise TypeError(
            f"{place}: the sampler returned {reprlib.repr(found)}; needs a list of token ids for each of the "
            f"{count} prompts, or a Completion with these and a log-probability for each"
        ) from None
    lengths = [len(each.tokens) for each in texts]
    if len(texts) != count or not all(1 <= length <= most for length in lengths):
        raise ValueError(
            f"{place}: the sampler returned {len(texts)} texts of {min(lengths, default=0)} to "
            f"{max(lengths, default=0)} tokens; needs {count} of 1 to {most}"
        )
    wrong = [
        number
        for number, each in enumerate(texts)
        if each.log_probs is not None
        and (len(each.log_probs) != len(each.tokens) or not all(map(math.isfinite, each.log_probs)))
    ]
    if wrong or len({each.log_probs is None for each in texts}) > 1:
        raise ValueError(
            f"{place}: the sampler returned log-probabilities that do not fit, such as those of text "
            f"{wrong[0] if wrong else 0}; needs a finite one for each token of all texts, or none at all"
        )
    return texts


def importance_weights(log_probs: Tensor, mask: Tensor, completions: Sequence[Completion]) -> Tensor:
    """How much likelier each text is under the policy than under the sampler that drew it, shape (rows,).

    The ratio of a text is the product of the ratios of its tokens. Multiplied with its advantage, it makes the expected
    gradient that of texts which the policy drew.

    >>> drawn = [Completion([4, 5], [-1.0, -2.0])]
    >>> log_probs = torch.tensor([[0.0, -1.0, -1.5]])  # of all tokens but the first of the prompt
    >>> importance_weights(log_probs, torch.tensor([[False, True, True]]), drawn)  # exp(-2.5 - -3)
    tensor([1.6487])

    Args:
        log_probs: of the policy, shape (rows, length - 1), nats.
        mask: true for the tokens that were written, the same shape.
        completions: one for each row, with the sampler's log-probabilities.
    """
    ours = torch.where(mask, log_probs, 0.0).cpu().double().sum(1)  # on the host: not every accelerator has float64
    theirs = torch.tensor([math.fsum(each.log_probs or ()) for each in completions], dtype=torch.float64)
    return (ours - theirs).clamp(max=80.0).exp().to(log_probs)  # within float32
