"""Draws tokens: from which part of a distribution, when a text ends, and by which random numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_number, check_positive, check_type, check_whole_number
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError, refused, shortened

__all__ = ["EndOfText", "Sampling", "TokenDraws", "end_tokens_of"]

_OVERLAP = 16  # tokens before a stop string that are decoded with it: the first tokens of a text may lose their space


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which tokens may be drawn, and what ends a text besides its end token.

    The steps apply in this order: repetition penalty, temperature, top-k, top-p, min-p. The log-probabilities that are
    learnt from remain those of the policy at its temperature over all tokens, as in TRL.

    >>> logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    >>> Sampling(top_p=0.7).restrict(logits).softmax(-1)
    tensor([[0.6250, 0.3750, 0.0000, 0.0000]])

    Args:
        top_k: keeps the k most likely tokens, and those that are equally likely (Fan 2018).
        top_p: keeps the fewest tokens whose probabilities sum to at least this (Holtzman 2020); 1 keeps all.
        min_p: keeps tokens at least this times as likely as the most likely one (Nguyen 2024); 0 keeps all.
        repetition_penalty: divides the positive logits of tokens in the prompt or the text, and multiplies the
            negative ones (Keskar 2019); 1 changes none.
        stop: texts or token sequences that end a text; the tokens that complete one are kept.
        decode: converts token ids to text, such as a tokenizer's `decode`; for texts in `stop`.

    Raises:
        ConfigurationError: a number is out of range, a stop is empty, or `decode` is missing.
        TypeError: a stop is neither a text nor a sequence of token ids.
    """

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[str | Sequence[int]] = ()
    decode: Callable[[list[int]], str] | None = None

    def __post_init__(self) -> None:
        check_whole_number("Sampling", "top_k", self.top_k, or_none=True)
        check_number("Sampling", "min_p", self.min_p, below=1.0)
        check_positive("Sampling", "repetition_penalty", self.repetition_penalty)
        if self.top_p != 1.0:
            check_positive("Sampling", "top_p", self.top_p, below=1.0)
        check_type("Sampling", "decode", self.decode, Callable | None, "a function from token ids to text")
        if isinstance(self.stop, str) or not isinstance(self.stop, Iterable):
            raise ArgumentTypeError("needs a list of texts or of token sequences", "Sampling", stop=self.stop)
        object.__setattr__(self, "stop", tuple(map(_stop, self.stop)))
        if self.decode is None and any(isinstance(each, str) for each in self.stop):
            rule = "texts are found in what decode= returns; pass the tokenizer's decode, or token sequences"
            raise refused(self, rule, "stop")

    def restrict(self, scores: Tensor) -> Tensor:
        """The scores, shape (rows, vocabulary), with -inf for tokens that top-k, top-p and min-p leave out."""
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1.0:
            ordered, order = scores.sort(descending=True, stable=True)
            chances = ordered.softmax(-1)
            enough = chances.cumsum(-1) - chances >= self.top_p  # by the tokens that are likelier
            scores = scores.masked_fill(enough.scatter(-1, order, enough), -torch.inf)
        if self.min_p:
            chances = scores.softmax(-1)
            least = self.min_p * chances.amax(-1, keepdim=True)
            scores = scores.masked_fill(chances < least, -torch.inf)
        return scores


def _stop(given: str | Sequence[int]) -> str | tuple[int, ...]:
    try:
        found = given if isinstance(given, str) else tuple(map(operator.index, given))
    except TypeError:
        needs = "needs a text or a sequence of token ids as each stop"
        raise ArgumentTypeError(needs, "Sampling", stop=shortened(given)) from None
    if not found:
        raise ConfigurationError("needs at least one character or token in each stop", "Sampling", stop=given)
    return found


class EndOfText:
    """Whether a text has ended, by an end token or a stop.

    >>> ended = EndOfText((0,), Sampling(stop=["ab", [5, 6]], decode=lambda tokens: bytes(tokens).decode()))
    >>> ended([7, 0]), ended([98, 97, 98]), ended([5, 6]), ended([6, 97])
    (True, True, True, False)

    Args:
        tokens: each of them ends a text.
        sampling: its stops do, too.
    """

    def __init__(self, tokens: Sequence[int], sampling: Sampling | None = None) -> None:
        stops = () if sampling is None else sampling.stop
        self._tokens = frozenset(tokens)
        self._texts = [each for each in stops if isinstance(each, str)]
        self._sequences = [list(each) for each in stops if not isinstance(each, str)]
        self._decode = None if sampling is None else sampling.decode
        self._tail = max((len(each.encode()) for each in self._texts), default=0) + _OVERLAP

    @property
    def never(self) -> bool:
        """Whether nothing but its length ends a text."""
        return not (self._tokens or self._texts or self._sequences)

    def __call__(self, completion: list[int]) -> bool:
        if completion[-1] in self._tokens:
            return True
        if any(completion[-len(each) :] == each for each in self._sequences):
            return True
        if not self._texts or self._decode is None:
            return False
        # a token has at least one byte, so this many hold the longest stop
        text = self._decode(completion[-self._tail :])
        if not isinstance(text, str):
            raise TypeError(f"Sampling(decode): returned {type(text).__name__}; needs a text")
        return any(each in text for each in self._texts)


def end_tokens_of(place: str, end_token: int | Sequence[int] | None) -> tuple[int, ...]:
    """The end tokens in an argument that takes one, several or None.

    >>> end_tokens_of("TextRollouts", 3), end_tokens_of("TextRollouts", [3, 5]), end_tokens_of("TextRollouts", None)
    ((3,), (3, 5), ())

    Raises:
        ConfigurationError: one is not a token id, or there is none in a list.
    """
    given: Sequence[Any] = () if end_token is None else (end_token,)
    if isinstance(end_token, (list, tuple)):
        given = end_token
    for each in given:
        check_whole_number(place, "end_token", each, at_least=0)
    if end_token is not None and not given:
        raise ConfigurationError("needs a token; pass None if none ends a text", place, end_token=end_token)
    return tuple(given)


class TokenDraws:
    """The texts of one batch as they grow: draws the next token of each, and finds out which have ended.

    A token is chosen by a uniform random number, where it falls in the cumulative distribution. Each text has its own
    sequence of numbers, so that it does not depend on how many others are drawn with it, or on when those end. The
    logits themselves may differ in their last bits with the number of rows that a model computes at once.

    >>> draws = TokenDraws([[3], [4]], max_new_tokens=2, end_token=1, seeds=[5, 6])
    >>> likely = torch.tensor([[0.0, 50.0], [50.0, 0.0]])
    >>> draws([0, 1], likely)  # the second text continues
    ([1, 0], [True, False])
    >>> draws([1], likely[1:]), draws.completions
    (([0], [True]), [[1], [0, 0]])

    Args:
        prompts: token ids of each prompt.
        max_new_tokens: the largest number of tokens of a completion.
        temperature: divides the logits; 0 takes the most likely token.
        end_token: one token that ends a text, several, or None.
        sampling: see `Sampling`.
        seeds: one for each text; None draws the numbers from torch's own generator.
        log_probs: whether to keep the log-probability with which each token was drawn, nats.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        end_token: int | Sequence[int] | None = None,
        sampling: Sampling | None = None,
        seeds: Sequence[int] | None = None,
        log_probs: bool = False,
    ) -> None:
        self.completions: list[list[int]] = [[] for _ in prompts]
        self.log_probs: list[list[float]] | None = [[] for _ in prompts] if log_probs else None
        self._prompts, self._most, self._temperature = prompts, max_new_tokens, temperature
        self._sampling = sampling or Sampling()
        self._ended = EndOfText(end_tokens_of("TokenDraws", end_token), self._sampling)
        size = (len(prompts), max_new_tokens)
        self._numbers = torch.zeros(size, dtype=torch.float64)
        if temperature and seeds is None:
            self._numbers.uniform_()
        elif temperature and seeds is not None:
            for numbers, seed in zip(self._numbers, seeds, strict=True):
                numbers.uniform_(generator=torch.Generator().manual_seed(seed))

    def __call__(self, rows: Sequence[int], logits: Tensor) -> tuple[list[int], list[bool]]:
        """Adds a token to each of these texts; returns the tokens, and whether each text ends with its token.

        Args:
            rows: the texts, by their number in the batch.
            logits: of their next tokens, shape (rows, vocabulary).

        Raises:
            ValueError: a logit is NaN, or all of a text are infinite.
        """
        tokens = self._choose(rows, logits).tolist()
        if min(tokens, default=0) < 0:
            row = rows[next(number for number, token in enumerate(tokens) if token < 0)]
            raise ValueError(
                f"TokenDraws: the logits of text {row}, after {len(self.completions[row])} tokens, make no "
                "distribution (NaN, or infinite); lower the learning rate, or check the weights"
            )
        ended = []
        for row, token in zip(rows, tokens, strict=True):
            text = self.completions[row]
            text.append(token)
            ended.append(len(text) == self._most or self._ended(text))
        return tokens, ended

    def _choose(self, rows: Sequence[int], logits: Tensor) -> Tensor:
        """The next tokens, shape (rows,); -1 where there is no distribution. Nothing waits for the device."""
        scores = logits.float()
        if self._sampling.repetition_penalty != 1.0:
            scores = self._penalized(rows, scores)
        if not self._temperature:
            if self.log_probs is not None:
                for row in rows:
                    self.log_probs[row].append(0.0)
            finite = scores.amax(-1).isfinite()  # a NaN is the largest
            return torch.where(finite, scores.argmax(-1), -1)
        chances = self._sampling.restrict(scores / self._temperature).softmax(-1)
        if chances.device.type != "mps":  # which has no float64
            chances = chances.double()
        reached = chances.cumsum(-1)
        places = [len(self.completions[row]) for row in rows]
        drawn = self._numbers[list(rows), places].to(reached.device, reached.dtype)
        total = reached[:, -1]
        tokens = torch.searchsorted(reached, (drawn * total).unsqueeze(-1), right=True)
        tokens = tokens.clamp(max=scores.shape[-1] - 1)
        if self.log_probs is not None:
            for row, chance in zip(rows, chances.gather(-1, tokens).log().flatten().tolist(), strict=True):
                self.log_probs[row].append(chance)
        return torch.where(total.isfinite(), tokens.squeeze(-1), -1)

    def _penalized(self, rows: Sequence[int], scores: Tensor) -> Tensor:
        """The scores after the repetition penalty."""
        used = torch.zeros_like(scores, dtype=torch.bool)
        for number, row in enumerate(rows):
            used[number, torch.tensor([*self._prompts[row], *self.completions[row]], device=scores.device)] = True
        penalty = self._sampling.repetition_penalty
        return torch.where(used, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
