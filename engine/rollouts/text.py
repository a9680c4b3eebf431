"""Rollouts of a language model: completions of prompts, and their rewards from a function."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_bool, check_positive, check_type, check_whole_number
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.sequences import IGNORED, pad_examples
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError, refused, shortened
from pulsetrain.engine.rollouts.base import PolicyTrainer, Rollouts
from pulsetrain.engine.rollouts.completions import Completion, importance_weights
from pulsetrain.engine.rollouts.drawing import EndOfText, Sampling, end_tokens_of
from pulsetrain.engine.rollouts.sampling import Sampler
from pulsetrain.engine.rollouts.writer import TextWriter
from pulsetrain.engine.strategies.language import values_of

__all__ = ["Reward", "TextRollouts"]

Reward = Callable[[list[list[int]], list[list[int]]], Sequence[float]]
"""`reward(prompts, completions)`, both as token ids: one number for each text."""

_SCORED = 64  # texts that are scored at a time


class TextRollouts(Rollouts):
    """Texts that the policy writes for prompts, and their rewards.

    A rollout is `prompts_per_rollout` prompts, each with as many completions as the strategy's group size. Prompts are
    used in shuffled order, each once before any is repeated. A model with `sample(prompts, max_new_tokens, *,
    temperature, end_token)` draws its texts itself. Any other model is called once per token, a Hugging Face model with
    its cache. Each text is drawn by random numbers of its own, which depend on the seed, the rollout and its row, so it
    does not depend on the number of processes.

    ROLLOUT_COMPLETED reports "rollout/reward", "rollout/reward_std", "rollout/length" in tokens, "rollout/ended" (the
    share of texts that ended by a token or a stop), and with a reference "rollout/reference_kl" in nats per token.
    Where the strategy trains in one pass, POLICY_UPDATED reports the latter. With a sampler that is not the policy,
    "rollout/sampler_ratio" is the mean of the texts' importance ratios, and "rollout/sampler_capped" the share of
    those above `importance_cap`.

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
        end_token: ends a text and is part of it; one or several. None makes all completions max_new_tokens long, if
            they have no stop.
        pad_token: fills rows after the end of a text.
        pad_to: a fixed length for all rows, for backends that compile per shape; None uses the longest text.
        sampler: draws texts instead of the model.
        sampling: which tokens may be drawn, and stops; see `Sampling`.
        importance_cap: the largest weight of a text that a different model has drawn, a sampler that returns its
            log-probabilities: the advantage is multiplied with how much likelier the text is under the policy, up to
            this (truncated importance sampling). None leaves the advantages as they are.
        staleness: 1 draws the texts of a rollout while the policy learns from the one before, by the weights from
            before that, of which it keeps a copy; their advantages are weighted by `importance_cap`. A checkpoint waits
            for these texts and holds them.
        background: whether a thread draws them. False draws the same texts at the same place in the run, but waits.

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
        end_token: int | Sequence[int] | None = None,
        pad_token: int = 0,
        pad_to: int | None = None,
        sampler: Sampler | None = None,
        sampling: Sampling | None = None,
        importance_cap: float | None = 2.0,
        staleness: int = 0,
        background: bool = True,
    ) -> None:
        self.prompts = _token_numbers(prompts)
        for name, value in (("max_new_tokens", max_new_tokens), ("prompts_per_rollout", prompts_per_rollout)):
            check_whole_number("TextRollouts", name, value)
        empty = [index for index, prompt in enumerate(self.prompts) if not prompt]
        if empty or not self.prompts:
            given: dict[str, object] = {f"prompts[{empty[0]}]" if empty else "prompts": []}
            raise ConfigurationError("needs token ids; a text starts with at least one", "TextRollouts", **given)
        longest = max(map(len, self.prompts)) + max_new_tokens
        check_type("TextRollouts", "sampling", sampling, Sampling | None, "a Sampling")
        self._ended = EndOfText(end_tokens_of("TextRollouts", end_token), sampling)
        check_whole_number("TextRollouts", "pad_token", pad_token, at_least=0)
        check_whole_number("TextRollouts", "pad_to", pad_to, at_least=0, or_none=True)
        needs = "a function of prompts and a number of tokens"
        check_type("TextRollouts", "sampler", sampler, Callable | None, needs)
        check_positive("TextRollouts", "importance_cap", importance_cap, or_none=True)
        check_whole_number("TextRollouts", "staleness", staleness, at_least=0, below=2)
        check_bool("TextRollouts", "background", background)
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
        self.sampling, self.importance_cap = sampling, importance_cap
        self.staleness, self.background = staleness, background
        self._sampler, self._longest = sampler, longest
        self._writer: TextWriter | None = None  # once there is a policy
        super().__init__()

    shares_ranks = True

    def restart(self) -> None:
        super().restart()
        if self._writer is not None:
            self._writer.restart()

    def progress(self) -> dict[str, Any]:
        return {} if self._writer is None else self._writer.state_dict(self.rollouts)

    def resume(self, progress: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.load_state_dict(progress)

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
        self._writer = TextWriter(
            trainer, self.sharing, self._texts_of, max_new_tokens=self.max_new_tokens, end_token=self.end_token,
            pad_token=self.pad_token, pad_to=self.pad_to, sampler=self._sampler, sampling=self.sampling,
            staleness=self.staleness, background=self.background,
        )  # fmt: skip

    def _prompts_of(self, rollout: int) -> list[list[int]]:
        """The prompt of each row of a rollout, from an order that is a function of (seed, pass over the prompts)."""
        chosen: list[list[int]] = []
        first = (rollout - 1) * self.prompts_per_rollout
        orders: dict[int, list[int]] = {}
        for number in range(first, first + self.prompts_per_rollout):
            turn, index = divmod(number, len(self.prompts))
            if turn not in orders:
                generator = torch.Generator().manual_seed(rng.derive(self.seed, turn))
                orders[turn] = torch.randperm(len(self.prompts), generator=generator).tolist()
            chosen += [self.prompts[orders[turn][index]]] * self.strategy.group_size
        return chosen

    def collect(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        prompts = self._prompts_of(self.rollouts)
        if self.sharing.is_shared:
            rng.seed_step(rng.derive(self.seed, self.sharing.rank.rank, self.rollouts))
        assert self._writer is not None
        with self.sharing.alone():
            found = self._writer.texts(self.rollouts)
            paid = self._rewards(self.sharing.part(prompts), [each.tokens for each in found])
        completions = self.sharing.whole(found)
        rewards = torch.tensor(self.sharing.whole(paid.tolist()), dtype=torch.float32)
        texts = [completion.after(prompt) for prompt, completion in zip(prompts, completions, strict=True)]
        padded = pad_examples(texts, pad_token=self.pad_token, length=self.pad_to)
        device = self.trainer.backend.device
        tokens, mask = padded["input_ids"].to(device), (padded["labels"] != IGNORED).to(device)
        corrected = self.importance_cap is not None and completions[0].log_probs is not None
        one_pass = self.trains_in_one_pass and not corrected
        scores = self._scores(tokens, one_pass)
        rollout = {"input_ids": tokens, "completion_mask": mask, "rewards": rewards.to(device), **scores}
        metrics = {
            "rollout/reward": rewards.mean().item(),
            "rollout/reward_std": rewards.std(correction=0).item(),
            "rollout/length": sum(each.length for each in completions) / len(completions),
            **self._metrics_of(completions),
        }
        if "reference_log_probs" in rollout and "log_probs" in rollout:
            apart = (rollout["log_probs"] - rollout["reference_log_probs"])[mask[:, 1:]]
            metrics["rollout/reference_kl"] = apart.mean().item()
        if corrected:
            ratios = importance_weights(rollout["log_probs"], mask[:, 1:], completions)
            rollout["weights"] = ratios.clamp(max=self.importance_cap)
            metrics["rollout/sampler_ratio"] = ratios.mean().item()
            metrics["rollout/sampler_capped"] = (ratios > rollout["weights"]).float().mean().item()
        drawn = self._writer.begin_next(self.rollouts + 1)
        return rollout, metrics | {f"rollout/{name}": value for name, value in drawn.items()}

    def rows_of(self, rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows that batches are made from; each advantage is multiplied with the weight of its text."""
        rows = super().rows_of(rollout)
        if "weights" in rollout:
            # a clipped objective is linear in the advantage, for weights that are not negative
            shape = [-1] + [1] * (rows["advantages"].ndim - 1)
            rows["advantages"] = rows["advantages"] * rollout["weights"].reshape(shape)
        return rows

    def _metrics_of(self, completions: Sequence[Completion]) -> dict[str, float]:
        """Metrics of texts besides their reward and length."""
        if self._ended.never:
            return {}
        return {"rollout/ended": sum(self._ended(each.tokens) for each in completions) / len(completions)}

    def _texts_of(self, rollout: int) -> list[Completion]:
        """This process's texts of a rollout, drawn by the present weights."""
        prompts = self._prompts_of(rollout)
        return self._completions(self.sharing.part(prompts), self.sharing.part(range(len(prompts))), rollout)

    def _completions(self, prompts: list[list[int]], rows: Sequence[int], rollout: int) -> list[Completion]:
        """What follows each prompt; `rows` are their rows in the rollout of all processes."""
        return self._draw(prompts, rows, rollout)

    def _draw(self, prompts: list[list[int]], rows: Sequence[int], rollout: int, turn: int = 0) -> list[Completion]:
        """One completion of each prompt."""
        assert self._writer is not None
        return self._writer.draw(prompts, [rng.derive(self.seed, rollout, row, turn) for row in rows])

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

    def _scores(self, tokens: Tensor, one_pass: bool) -> dict[str, Tensor]:
        """Log-probabilities of all tokens but the first under the policy and the reference, and the policy's values."""
        found: dict[str, list[Tensor]] = {}
        strategy = self.strategy
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
