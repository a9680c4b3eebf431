"""Rollouts of a language model: texts to prompts, and what a program says that they are worth."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.data import rng
from pulsetrain.engine.data.sequences import IGNORED, pad_examples
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.rollouts.base import Rollouts
from pulsetrain.engine.rollouts.sampling import Sampler, sampler_of
from pulsetrain.engine.strategies.language import values_of

__all__ = ["Reward", "TextRollouts"]

Reward = Callable[[list[list[int]], list[list[int]]], Sequence[float]]
"""Of prompts and what followed them, both as token numbers: one number for each text."""

_LOOKED_AT = 64  # texts that are scored at a time


class TextRollouts(Rollouts):
    """Texts that the policy writes to prompts, and their rewards.

    A rollout is `prompts_per_rollout` prompts, each answered as often as the strategy's group is large. Prompts come in
    a shuffled order, all of them before one comes again. A model that has `sample(prompts, max_new_tokens, *,
    temperature, end_token)` draws its texts itself; one of Hugging Face's does by `generate`; any other is called
    again for every token.

    ROLLOUT_COMPLETED tells "rollout/reward" and "rollout/reward_std", "rollout/length" in tokens, "rollout/ended", the
    share that came to the end token, and with a reference "rollout/reference_kl", nats a token.

    Args:
        prompts: token numbers.
        reward: called with all prompts of a rollout and what followed them; gives as many numbers.
        max_new_tokens: of each text.
        prompts_per_rollout: that many prompts a rollout.
        end_token: ends a text, and is a part of it; None lets all become max_new_tokens long.
        pad_token: stands behind a text in a batch.
        pad_to: length of all rows, for backends that compile for each; None takes that of the rollout's longest.
        sampler: draws texts in place of the model.

    Raises:
        ConfigurationError: no prompt, an empty one, or a number out of range.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        reward: Reward,
        *,
        max_new_tokens: int = 64,
        prompts_per_rollout: int = 8,
        end_token: int | None = None,
        pad_token: int = 0,
        pad_to: int | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.prompts = _token_numbers(prompts)
        for name, value in (("max_new_tokens", max_new_tokens), ("prompts_per_rollout", prompts_per_rollout)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"TextRollouts({name}={value!r}): needs a whole number of at least 1")
        empty = [index for index, prompt in enumerate(self.prompts) if not prompt]
        if empty or not self.prompts:
            what = f"prompts[{empty[0]}]=[]" if empty else "prompts=[]"
            raise ConfigurationError(f"TextRollouts({what}): needs token numbers; a text begins with at least one")
        longest = max(map(len, self.prompts)) + max_new_tokens
        numbers: dict[str, Any] = {"end_token": end_token, "pad_token": pad_token, "pad_to": pad_to}
        for name, number in numbers.items():
            optional = number is None and name != "pad_token"
            if not optional and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
                raise ConfigurationError(f"TextRollouts({name}={number!r}): needs a whole number of at least 0")
        if sampler is not None and not callable(sampler):
            raise TypeError(f"TextRollouts(sampler={sampler!r}): needs a function of prompts and a number of tokens")
        if pad_to is not None and pad_to < longest:
            raise ConfigurationError(
                f"TextRollouts(pad_to={pad_to}): the longest prompt and max_new_tokens={max_new_tokens} make {longest} "
                "tokens; pad to as many at least"
            )
        if not callable(reward):
            raise TypeError(f"TextRollouts(reward={reward!r}): needs a function of prompts and completions")
        self.reward, self.max_new_tokens, self.prompts_per_rollout = reward, max_new_tokens, prompts_per_rollout
        self.end_token, self.pad_token, self.pad_to = end_token, pad_token, pad_to
        self._sampler, self._longest = sampler, longest
        super().__init__()

    @property
    def rows(self) -> int:
        return self.prompts_per_rollout * self.strategy.group_size

    def begin(self, trainer: Any) -> None:
        context = trainer.strategy.context
        if context is not None and self.pad_to is not None and self.pad_to > context + 1:
            raise ConfigurationError(
                f"TextRollouts(pad_to={self.pad_to}): rows are longer than the model's context of {context} and the "
                f"token that follows; pad to {context + 1} at most"
            )
        if context is not None and self._longest > context + 1:
            raise ConfigurationError(
                f"TextRollouts(max_new_tokens={self.max_new_tokens}): with the longest prompt a text has "
                f"{self._longest} tokens, more than the model's context of {context} and the one that follows; cut the "
                "prompts, or ask for fewer tokens"
            )
        strategy = trainer.strategy
        most = getattr(strategy, "max_length", None)
        if most is not None and most < self.max_new_tokens:
            raise ConfigurationError(
                f"{type(strategy).__name__}(max_length={most}): a text may have max_new_tokens={self.max_new_tokens}; "
                "give as many at least"
            )
        if strategy.kl_coef and not strategy.has_reference:
            raise ConfigurationError(
                f"{type(strategy).__name__}(kl_coef={strategy.kl_coef!r}, reference=None): over texts it weighs the "
                "divergence from the reference; leave reference='copy', or set kl_coef=0.0"
            )
        if self._sampler is None:
            self._sampler = sampler_of(
                trainer.model, trainer.strategy.model_inputs, trainer.backend.device, self.pad_token, self.pad_to
            )

    def _next_prompts(self) -> list[list[int]]:
        """Those of the rollout under way: a place in the order of (seed, pass over the prompts)."""
        chosen: list[list[int]] = []
        first = (self.rollouts - 1) * self.prompts_per_rollout
        orders: dict[int, list[int]] = {}
        for number in range(first, first + self.prompts_per_rollout):
            turn, place = divmod(number, len(self.prompts))
            if turn not in orders:
                generator = torch.Generator().manual_seed(rng.derive(self.seed, turn))
                orders[turn] = torch.randperm(len(self.prompts), generator=generator).tolist()
            chosen.append(self.prompts[orders[turn][place]])
        return chosen

    def collect(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        prompts = [prompt for prompt in self._next_prompts() for _ in range(self.strategy.group_size)]
        completions = self._completions(prompts)
        rewards = self._rewards(prompts, completions)
        texts = [
            {"input_ids": [*prompt, *completion], "labels": [IGNORED] * len(prompt) + list(completion)}
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        padded = pad_examples(texts, pad_token=self.pad_token, length=self.pad_to)
        device = self.trainer.backend.device
        tokens, mask = padded["input_ids"].to(device), (padded["labels"] != IGNORED).to(device)
        rollout = {"input_ids": tokens, "completion_mask": mask, "rewards": rewards.to(device), **self._scores(tokens)}
        lengths = [len(completion) for completion in completions]
        metrics = {
            "rollout/reward": rewards.mean().item(),
            "rollout/reward_std": rewards.std(correction=0).item(),
            "rollout/length": sum(lengths) / len(lengths),
        }
        if self.end_token is not None:
            metrics["rollout/ended"] = sum(each[-1] == self.end_token for each in completions) / len(completions)
        if "reference_log_probs" in rollout:
            apart = (rollout["log_probs"] - rollout["reference_log_probs"])[mask[:, 1:]]
            metrics["rollout/reference_kl"] = apart.mean().item()
        return rollout, metrics

    def _completions(self, prompts: list[list[int]]) -> list[list[int]]:
        assert self._sampler is not None
        try:
            with self.autocast():
                found = self._sampler(
                    [list(each) for each in prompts],
                    self.max_new_tokens,
                    temperature=self.strategy.temperature,
                    end_token=self.end_token,
                )
        except Exception as error:
            low, high = min(map(min, prompts)), max(map(max, prompts))
            error.add_note(
                f"in TextRollouts, where texts are drawn to {len(prompts)} prompts of tokens {low} to {high}"
            )
            raise
        try:
            found = [[operator.index(token) for token in each] for each in found]
        except (TypeError, ValueError):
            raise TypeError(
                f"TextRollouts: the sampler gave {reprlib.repr(found)}; needs a list of token numbers for each of the "
                f"{len(prompts)} prompts"
            ) from None
        lengths = [len(each) for each in found]
        if len(found) != len(prompts) or not all(1 <= length <= self.max_new_tokens for length in lengths):
            raise ValueError(
                f"TextRollouts: the sampler gave {len(found)} texts of {min(lengths, default=0)} to "
                f"{max(lengths, default=0)} tokens; needs {len(prompts)} of 1 to {self.max_new_tokens}"
            )
        return found

    def _rewards(self, prompts: list[list[int]], completions: list[list[int]]) -> Tensor:
        # copies: what the reward does with them must not change what is learnt, nor the prompts
        given = self.reward([list(each) for each in prompts], [list(each) for each in completions])
        try:
            rewards = torch.as_tensor(given, dtype=torch.float32, device="cpu").detach()
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"TextRollouts: the reward gave {reprlib.repr(given)}; needs a list of numbers, one for each of the "
                f"{len(prompts)} texts"
            ) from None
        if rewards.shape != (len(prompts),):
            raise ValueError(
                f"TextRollouts: the reward gave numbers of shape {tuple(rewards.shape)} for {len(prompts)} texts; one "
                "for each"
            )
        return rewards

    def _scores(self, tokens: Tensor) -> dict[str, Tensor]:
        """Log-probabilities of each token but the first: the policy's, the reference's; and the policy's values."""
        found: dict[str, list[Tensor]] = {"log_probs": []}
        strategy = self.strategy
        for rows in tokens.split(strategy.minibatch_size or _LOOKED_AT):
            inputs, follow = strategy.model_inputs(rows[:, :-1]), rows[:, 1:]
            outputs = self.act(inputs)
            found["log_probs"].append(strategy.action_log_probs(outputs, follow))
            reference = strategy.reference_log_probs(inputs, follow)
            if reference is not None:
                found.setdefault("reference_log_probs", []).append(reference)
            if strategy.needs_values:
                found.setdefault("values", []).append(values_of(outputs, follow.shape).float())
        return {name: torch.cat(parts) for name, parts in found.items()}


def _token_numbers(prompts: Any) -> list[list[int]]:
    try:
        return [[operator.index(token) for token in prompt] for prompt in prompts]
    except TypeError:
        raise TypeError(
            f"TextRollouts(prompts={reprlib.repr(prompts)}): needs a list of token numbers for each prompt; encode "
            "texts with the model's tokenizer"
        ) from None
