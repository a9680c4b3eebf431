"""Rollouts of a language model: completions of prompts, and their rewards from a function."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_type, check_whole_number
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.sequences import IGNORED, pad_examples
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError, refused, shortened
from pulsetrain.engine.rollouts.base import PolicyTrainer, Rollouts
from pulsetrain.engine.rollouts.sampling import Sampler, sampler_of
from pulsetrain.engine.strategies.language import values_of

__all__ = ["Reward", "TextRollouts"]

Reward = Callable[[list[list[int]], list[list[int]]], Sequence[float]]
"""`reward(prompts, completions)`, both as token ids: one number for each text."""

_SCORED = 64  # texts that are scored at a time


class TextRollouts(Rollouts):
    """Texts that the policy writes for prompts, and their rewards.

    A rollout is `prompts_per_rollout` prompts, each with as many completions as the strategy's group size. Prompts are
    used in shuffled order, each once before any is repeated. A model with `sample(prompts, max_new_tokens, *,
    temperature, end_token)` draws its texts itself, a Hugging Face model uses `generate`, and any other model is called
    once per token.

    ROLLOUT_COMPLETED reports "rollout/reward", "rollout/reward_std", "rollout/length" in tokens, "rollout/ended" (the
    share of texts with an end token), and with a reference "rollout/reference_kl" in nats per token. Where the strategy
    trains in one pass, POLICY_UPDATED reports the latter.

    >>> def shortness(prompts, completions):
    ...     return [-float(len(completion)) for completion in completions]
    >>> rollouts = TextRollouts([[1, 2], [3]], shortness, max_new_tokens=8, prompts_per_rollout=2, end_token=0)
    >>> rollouts.reward([[1, 2]], [[5, 0]])
    [-2.0]

    Args:
        prompts: token ids of each prompt.
        reward: called with all prompts of a rollout and their completions; returns one number for each.
        max_new_tokens: the largest number of tokens of a completion.
        prompts_per_rollout: the number of prompts in a rollout.
        end_token: ends a text and is part of it; None makes all completions max_new_tokens long.
        pad_token: fills rows after the end of a text.
        pad_to: a fixed length for all rows, for backends that compile per shape; None uses the longest text.
        sampler: draws texts instead of the model.

    Raises:
        ConfigurationError: there is no prompt, a prompt is empty, or a number is out of range.
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
            check_whole_number("TextRollouts", name, value)
        empty = [index for index, prompt in enumerate(self.prompts) if not prompt]
        if empty or not self.prompts:
            given: dict[str, object] = {f"prompts[{empty[0]}]" if empty else "prompts": []}
            raise ConfigurationError("needs token ids; a text starts with at least one", "TextRollouts", **given)
        longest = max(map(len, self.prompts)) + max_new_tokens
        check_whole_number("TextRollouts", "end_token", end_token, at_least=0, or_none=True)
        check_whole_number("TextRollouts", "pad_token", pad_token, at_least=0)
        check_whole_number("TextRollouts", "pad_to", pad_to, at_least=0, or_none=True)
        needs = "a function of prompts and a number of tokens"
        check_type("TextRollouts", "sampler", sampler, Callable | None, needs)
        if pad_to is not None and pad_to < longest:
            raise ConfigurationError(
                f"the longest prompt and max_new_tokens={max_new_tokens} make {longest} "
                f"tokens; pass at least pad_to={longest}",
                "TextRollouts",
                pad_to=pad_to,
            )
        check_type("TextRollouts", "reward", reward, Callable, "a function of prompts and completions")
        self.reward, self.max_new_tokens, self.prompts_per_rollout = reward, max_new_tokens, prompts_per_rollout
        self.end_token, self.pad_token, self.pad_to = end_token, pad_token, pad_to
        self._sampler, self._longest = sampler, longest
        super().__init__()

    shares_ranks = True

    @property
    def rows(self) -> int:
        return self.prompts_per_rollout * self.strategy.group_size

    def begin(self, trainer: PolicyTrainer) -> None:
        context = trainer.strategy.context
        if context is not None and self.pad_to is not None and self.pad_to > context + 1:
            rule = f"rows are longer than the model's context of {context} plus the token that follows"
            raise refused(self, f"{rule}; pass at most pad_to={context + 1}", "pad_to")
        if context is not None and self._longest > context + 1:
            rule = (
                f"with the longest prompt a text has {self._longest} tokens, more than the model's context of "
                f"{context} plus the one that follows; cut the prompts, or pass a smaller max_new_tokens"
            )
            raise refused(self, rule, "max_new_tokens")
        strategy = trainer.strategy
        most = getattr(strategy, "max_length", None)
        if most is not None and most < self.max_new_tokens:
            needed = self.max_new_tokens
            rule = f"a text may have max_new_tokens={needed}; pass at least max_length={needed}"
            raise refused(strategy, rule, "max_length")
        if strategy.kl_coef and not strategy.has_reference:
            raise ConfigurationError(
                "for texts it weights the divergence from the reference; leave reference='copy', or set kl_coef=0.0",
                type(strategy).__name__,
                kl_coef=strategy.kl_coef,
                reference=None,
            )
        count = self.sharing.rank.count
        if self.prompts_per_rollout % count:
            given = {"prompts_per_rollout": self.prompts_per_rollout}
            raise ConfigurationError(f"{count} processes cannot share them evenly", "TextRollouts", **given)
        if self._sampler is None:
            agree = self.sharing.any if is_sharded(trainer.model) else None
            self._sampler = sampler_of(
                trainer.model, trainer.strategy.model_inputs, trainer.backend.device, self.pad_token, self.pad_to, agree
            )

    def _next_prompts(self) -> list[list[int]]:
        """The prompts of the current rollout, from an order that is a function of (seed, pass over the prompts)."""
        chosen: list[list[int]] = []
        first = (self.rollouts - 1) * self.prompts_per_rollout
        orders: dict[int, list[int]] = {}
        for number in range(first, first + self.prompts_per_rollout):
            turn, index = divmod(number, len(self.prompts))
            if turn not in orders:
                generator = torch.Generator().manual_seed(rng.derive(self.seed, turn))
                orders[turn] = torch.randperm(len(self.prompts), generator=generator).tolist()
            chosen.append(self.prompts[orders[turn][index]])
        return chosen

    def collect(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        prompts = [prompt for prompt in self._next_prompts() for _ in range(self.strategy.group_size)]
        if self.sharing.is_shared:
            rng.seed_step(rng.derive(self.seed, self.sharing.rank.rank, self.rollouts))
        with self.sharing.alone():
            mine = self.sharing.part(prompts)
            found = self._completions(mine)
            paid = self._rewards(mine, found)
        completions = self.sharing.whole(found)
        rewards = torch.tensor(self.sharing.whole(paid.tolist()), dtype=torch.float32)
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
        if "reference_log_probs" in rollout and "log_probs" in rollout:
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
            error.add_note(f"in TextRollouts, while drawing texts for {len(prompts)} prompts of tokens {low} to {high}")
            raise
        try:
            found = [[operator.index(token) for token in each] for each in found]
        except (TypeError, ValueError):
            raise TypeError(
                f"TextRollouts: the sampler returned {reprlib.repr(found)}; needs a list of token ids for each of the "
                f"{len(prompts)} prompts"
            ) from None
        lengths = [len(each) for each in found]
        if len(found) != len(prompts) or not all(1 <= length <= self.max_new_tokens for length in lengths):
            raise ValueError(
                f"TextRollouts: the sampler returned {len(found)} texts of {min(lengths, default=0)} to "
                f"{max(lengths, default=0)} tokens; needs {len(prompts)} of 1 to {self.max_new_tokens}"
            )
        return found

    def _rewards(self, prompts: list[list[int]], completions: list[list[int]]) -> Tensor:
        # copies: the reward may change its arguments, but not the texts that are trained on
        given = self.reward([list(each) for each in prompts], [list(each) for each in completions])
        try:
            rewards = torch.as_tensor(given, dtype=torch.float32, device="cpu").detach()
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"TextRollouts: the reward returned {reprlib.repr(given)}; needs a list of numbers, one for each of "
                f"the {len(prompts)} texts"
            ) from None
        if rewards.shape != (len(prompts),):
            raise ValueError(
                f"TextRollouts: the reward returned numbers of shape {tuple(rewards.shape)} for {len(prompts)} texts; "
                "needs one for each"
            )
        return rewards

    def _scores(self, tokens: Tensor) -> dict[str, Tensor]:
        """Log-probabilities of all tokens but the first under the policy and the reference, and the policy's values."""
        found: dict[str, list[Tensor]] = {}
        strategy, one_pass = self.strategy, self.trains_in_one_pass
        if one_pass and not strategy.has_reference:
            return {}
        mine = tokens[self.sharing.part(range(len(tokens)))]
        for rows in mine.split(strategy.minibatch_size or _SCORED):
            inputs, follow = strategy.model_inputs(rows[:, :-1]), rows[:, 1:]
            outputs = None if one_pass else self.act(inputs)
            if not one_pass:
                found.setdefault("log_probs", []).append(strategy.action_log_probs(outputs, follow))
            reference = strategy.reference_log_probs(inputs, follow)
            if reference is not None:
                found.setdefault("reference_log_probs", []).append(reference)
            if strategy.needs_values:
                found.setdefault("values", []).append(values_of(outputs, follow.shape).float())
        return self.sharing.whole_rows({name: torch.cat(parts) for name, parts in found.items()})


def _token_numbers(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    try:
        return [[operator.index(token) for token in prompt] for prompt in prompts]
    except TypeError:
        raise ArgumentTypeError(
            "needs a list of token ids for each prompt; encode texts with the model's tokenizer",
            "TextRollouts",
            prompts=shortened(prompts),
        ) from None
