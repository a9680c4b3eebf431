"""Rollouts of a language model: completions of prompts, and their rewards from functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_bool, check_number, check_positive, check_type, check_whole_number
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.sequences import IGNORED, pad_examples
from pulsetrain.engine.errors import ConfigurationError, refused
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.payloads import MediaLogged
from pulsetrain.engine.rollouts.base import PolicyTrainer, Rollouts
from pulsetrain.engine.rollouts.completions import Completion, importance_weights
from pulsetrain.engine.rollouts.drawing import EndOfText, Sampling, end_tokens_of
from pulsetrain.engine.rollouts.prompts import decoder_of, read_prompts
from pulsetrain.engine.rollouts.rewards import Reward, Rewards, Weights
from pulsetrain.engine.rollouts.sampling import Sampler
from pulsetrain.engine.rollouts.writer import TextWriter
from pulsetrain.engine.strategies.language import values_of

__all__ = ["Reward", "TextRollouts"]

_SCORED = 64  # texts that are scored at a time
_SHOWN = 1000  # characters of a prompt or a completion in the log


class TextRollouts(Rollouts):
    """Texts that the policy writes for prompts, and their rewards.

    A rollout is `prompts_per_rollout` prompts, each with as many completions as the strategy's group size. Prompts are
    used in shuffled order, each once before any is repeated. A model with `sample(prompts, max_new_tokens, *,
    temperature, end_token)` draws its texts itself. Any other model is called once per token, a Hugging Face model with
    its cache. Each text is drawn by random numbers of its own, which depend on the seed, the rollout and its row, so it
    does not depend on the number of processes.

    Reward functions get prompts and completions as token ids; with a tokenizer, as texts, or as messages where the
    prompts are. The end token is not part of a text or a message. How they are called: see
    `pulsetrain.engine.rollouts.rewards.Rewards`.

    ROLLOUT_COMPLETED reports "rollout/reward", "rollout/reward_std", of several functions also "rollout/reward/NAME"
    and "rollout/reward_std/NAME"; "rollout/length" in tokens and "rollout/length_min" and "rollout/length_max"; with
    an end token or a stop "rollout/ended" and "rollout/truncated" (the shares of texts with and without it); of groups
    "rollout/zero_variance_groups" (the share of those whose rewards are equal, from which nothing is learnt); and with
    a reference "rollout/reference_kl" in nats per token. Where the strategy trains in one pass, POLICY_UPDATED reports
    the latter. With a sampler that is not the policy, "rollout/sampler_ratio" is the mean of the texts' importance
    ratios, and "rollout/sampler_capped" the share of those above `importance_cap`.

    As the Trainer's val_loader it evaluates the policy on its prompts: one completion for each, drawn with the same
    random numbers in every validation. The metrics are "val/reward" and so on.

    >>> def shortness(prompts, completions):
    ...     return [-float(len(completion)) for completion in completions]
    >>> rollouts = TextRollouts([[1, 2], [3]], shortness, max_new_tokens=8, prompts_per_rollout=2, end_token=0)
    >>> rollouts.reward([[1, 2]], [[5, 0]])
    [-2.0]

    Args:
        prompts: token ids of each prompt; with a tokenizer also texts, or lists of messages. Or mappings with one of
            these as "prompt"; their other fields, such as "answer", are given to the reward functions that name them.
        reward: a function of prompts and completions, a list of functions, or a mapping name -> function. A function
            returns a number for each text, or None where it does not apply; it may be asynchronous.
        reward_weights: of several functions, in their order or by name; the reward of a text is the weighted sum of
            those that apply to it. None gives each 1.0.
        tokenizer: has encode and decode, as those of Hugging Face.
        max_new_tokens: the largest number of tokens of a completion.
        prompts_per_rollout: the number of prompts in a rollout; in a validation, of those drawn for at a time.
        end_token: ends a text and is part of it; one or several. None makes all completions max_new_tokens long, if
            they have no stop.
        pad_token: fills rows after the end of a text.
        pad_to: a fixed length for all rows, for backends that compile per shape; None uses the longest text.
        sampler: draws texts instead of the model.
        sampling: which tokens may be drawn, and stops; see `Sampling`.
        importance_cap: the largest weight of a text that a different model has drawn, a sampler that returns its
            log-probabilities: the advantage is multiplied with how much likelier the text is under the policy, up to
            this (truncated importance sampling). None leaves the advantages as they are.
        staleness: draws the texts of a rollout while the policy learns from so many rollouts before it, by the weights
            from before those, and keeps as many copies of the weights; their advantages are weighted by
            `importance_cap`. A checkpoint waits for these texts and holds them.
        background: whether a thread draws them. False draws the same texts at the same place in the run, but waits.
        log_completions: how many completions of each rollout or validation are published by MEDIA_LOGGED, with prompt
            and rewards, in at most 1000 characters each; loggers, the recorder and the report show them.
        temperature: of a validation set: divides the logits; 0 takes the most likely token each time. None: as the
            strategy draws. Training draws at the strategy's temperature.

    Raises:
        ConfigurationError: there is no prompt, a prompt is empty, a number is out of range, or the functions do not fit
            the columns.
    """

    reward: Reward | Sequence[Reward] | Mapping[str, Reward]
    max_new_tokens: int
    prompts_per_rollout: int
    end_token: int | Sequence[int] | None
    pad_token: int
    pad_to: int | None
    sampling: Sampling | None
    importance_cap: float | None
    staleness: int
    background: bool
    log_completions: int

    def __init__(
        self,
        prompts: Sequence[Any],
        reward: Reward | Sequence[Reward] | Mapping[str, Reward],
        *,
        reward_weights: Weights | None = None,
        tokenizer: object = None,
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
        log_completions: int = 0,
        temperature: float | None = None,
    ) -> None:
        self._decode = None if tokenizer is None else decoder_of("TextRollouts", tokenizer)
        self._asked = read_prompts("TextRollouts", prompts, tokenizer, self._decode)
        self.prompts: list[list[int]] = self._asked.tokens
        for name, value in (("max_new_tokens", max_new_tokens), ("prompts_per_rollout", prompts_per_rollout)):
            check_whole_number("TextRollouts", name, value)
        longest = max(map(len, self.prompts)) + max_new_tokens
        check_type("TextRollouts", "sampling", sampling, Sampling | None, "a Sampling")
        self._end_tokens = end_tokens_of("TextRollouts", end_token)
        self._ended = EndOfText(self._end_tokens, sampling)
        check_whole_number("TextRollouts", "pad_token", pad_token, at_least=0)
        check_whole_number("TextRollouts", "pad_to", pad_to, at_least=0, or_none=True)
        check_whole_number("TextRollouts", "log_completions", log_completions, at_least=0)
        needs = "a function of prompts and a number of tokens"
        check_type("TextRollouts", "sampler", sampler, Callable | None, needs)
        check_positive("TextRollouts", "importance_cap", importance_cap, or_none=True)
        check_whole_number("TextRollouts", "staleness", staleness, at_least=0)
        check_bool("TextRollouts", "background", background)
        if temperature is not None:
            check_number("TextRollouts", "temperature", temperature)
        if pad_to is not None and pad_to < longest:
            raise ConfigurationError(
                f"the longest prompt and max_new_tokens={max_new_tokens} make {longest} "
                f"tokens; pass at least pad_to={longest}",
                "TextRollouts",
                pad_to=pad_to,
            )
        self._rewards = Rewards(reward, reward_weights, self._asked.columns)
        self.reward, self.max_new_tokens, self.prompts_per_rollout = reward, max_new_tokens, prompts_per_rollout
        self.end_token, self.pad_token, self.pad_to = end_token, pad_token, pad_to
        self.sampling, self.importance_cap = sampling, importance_cap
        self.staleness, self.background, self.log_completions = staleness, background, log_completions
        self.temperature = temperature
        self._sampler, self._longest = sampler, longest
        self._writer: TextWriter | None = None  # once there is a policy
        super().__init__()

    shares_ranks = judges_policy = True

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
        strategy = trainer.strategy
        if self.temperature is not None and self.temperature != strategy.temperature:
            rule = f"is of a validation set; training draws at the strategy's, {strategy.temperature:g}; set it there"
            raise refused(self, rule, "temperature")
        most = getattr(strategy, "max_length", None)
        if most is not None and most < self.max_new_tokens:
            needed = self.max_new_tokens
            rule = f"a text may have max_new_tokens={needed}; pass at least max_length={needed}"
            raise refused(strategy, rule, "max_length")
        if getattr(strategy, "mask_truncated", False) and not self._may_end:
            rule = "without an end token every text is cut at max_new_tokens; pass TextRollouts(end_token=...)"
            raise refused(strategy, rule, "mask_truncated")
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
        self._choose_writer(trainer, self.staleness)

    def _choose_writer(self, trainer: PolicyTrainer, staleness: int = 0) -> None:
        """What draws the texts, after checks that they fit the model's context."""
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
        self._writer = TextWriter(
            trainer, self.sharing, self._texts_of, max_new_tokens=self.max_new_tokens, end_token=self.end_token,
            pad_token=self.pad_token, pad_to=self.pad_to, sampler=self._sampler, sampling=self.sampling,
            staleness=staleness, background=self.background, temperature=self.temperature,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ for a validation

    def attach_for_validation(self, trainer: PolicyTrainer) -> None:
        """Serves as a validation set of this trainer, in which its policy acts.

        Raises:
            ConfigurationError: the strategy does not learn from rollouts, texts do not fit the model's context, or the
                trainer learns from these rollouts and draws their texts ahead.
        """
        if self._trainer is trainer and self.staleness:
            rule = "it is the train_loader, too, whose texts are drawn ahead; give the validation its own TextRollouts"
            raise refused(self, rule, "staleness")
        self._adopt(trainer, self._choose_writer)

    @torch.no_grad()
    def evaluate_policy(self, name: str, batches: int | None = None) -> dict[str, float]:
        """The metrics of one completion for each prompt, such as "NAME/reward"; the model has to be in eval mode.

        Each text has the same random numbers in every validation. It seeds the generators of the process, too, for
        samplers that draw from those, and does not restore them.

        Args:
            name: of the validation set.
            batches: how often prompts_per_rollout prompts are drawn for; None uses all prompts.
        """
        size, count = self.prompts_per_rollout, self.sharing.rank.count
        asked = list(range(len(self.prompts)))[: None if batches is None else batches * size]
        assert self._writer is not None
        self._writer.update(0)
        completions: list[Completion] = []
        parts: list[Tensor] = []
        for number, start in enumerate(range(0, len(asked), size)):
            chosen = asked[start : start + size]
            padded = chosen + chosen[-1:] * (-len(chosen) % count)  # each process draws as many texts
            rng.seed_everything(rng.derive(self.sharing.rank.rank, number))
            mine = self.sharing.part(padded)
            with self.sharing.alone():
                drawn = self._completions([self.prompts[index] for index in mine], mine, 0)  # rollouts begin with 1
                scored = self._scored(mine, [each.tokens for each in drawn])
            found, paid = self._whole(drawn, scored)
            completions += found[: len(chosen)]
            parts.append(paid[: len(chosen)])
        rewards = torch.cat(parts)
        self._publish(name, asked, completions, rewards)
        return {f"{name}/{metric}": value for metric, value in self._metrics(completions, rewards).items()}

    # --------------------------------------------------------------------------------------------------- for a rollout

    def _prompts_of(self, rollout: int) -> list[int]:
        """The prompt of each row of a rollout, from an order that is a function of (seed, pass over the prompts)."""
        chosen: list[int] = []
        first = (rollout - 1) * self.prompts_per_rollout
        orders: dict[int, list[int]] = {}
        for number in range(first, first + self.prompts_per_rollout):
            turn, index = divmod(number, len(self.prompts))
            if turn not in orders:
                generator = torch.Generator().manual_seed(rng.derive(self.seed, turn))
                orders[turn] = torch.randperm(len(self.prompts), generator=generator).tolist()
            chosen += [orders[turn][index]] * self.strategy.group_size
        return chosen

    def collect(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        group_size = self.strategy.group_size
        chosen = self._prompts_of(self.rollouts)
        if self.sharing.is_shared:
            rng.seed_step(rng.derive(self.seed, self.sharing.rank.rank, self.rollouts))
        assert self._writer is not None
        with self.sharing.alone():
            found = self._writer.texts(self.rollouts)
            scored = self._scored(self.sharing.part(chosen), [each.tokens for each in found])
        completions, parts = self._whole(found, scored)
        rewards = self._rewards.totals(parts)
        texts = [each.after(self.prompts[index]) for index, each in zip(chosen, completions, strict=True)]
        padded = pad_examples(texts, pad_token=self.pad_token, length=self.pad_to)
        device = self.trainer.backend.device
        tokens, mask = padded["input_ids"].to(device), (padded["labels"] != IGNORED).to(device)
        corrected = self.importance_cap is not None and completions[0].log_probs is not None
        if self.staleness and self.importance_cap is not None and not corrected:
            rule = "texts drawn ahead are weighted by log-probabilities, which the sampler does not return; pass None"
            raise refused(self, rule, "importance_cap")
        scores = self._scores(tokens, self.trains_in_one_pass and not corrected)
        rollout = {"input_ids": tokens, "completion_mask": mask, "rewards": rewards.to(device), **scores}
        rollout |= {"reward_parts": parts.to(device), "reward_weights": self._rewards.weights.to(device)}
        metrics = {f"rollout/{name}": value for name, value in self._metrics(completions, parts).items()}
        if self._may_end:
            rollout["truncated"] = torch.tensor(list(map(self._is_truncated, completions)), device=device)
        if group_size > 1:
            groups = rewards.view(-1, group_size)
            metrics["rollout/zero_variance_groups"] = (groups == groups[:, :1]).all(1).float().mean().item()
        if "reference_log_probs" in rollout and "log_probs" in rollout:
            apart = (rollout["log_probs"] - rollout["reference_log_probs"])[mask[:, 1:]]
            metrics["rollout/reference_kl"] = apart.mean().item()
        if corrected:
            ratios = importance_weights(rollout["log_probs"], mask[:, 1:], completions)
            rollout["weights"] = ratios.clamp(max=self.importance_cap)
            metrics["rollout/sampler_ratio"] = ratios.mean().item()
            metrics["rollout/sampler_capped"] = (ratios > rollout["weights"]).float().mean().item()
        self._publish("rollout", chosen, completions, parts)
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

    def _texts_of(self, rollout: int) -> list[Completion]:
        """This process's texts of a rollout, drawn by the present weights."""
        chosen = self._prompts_of(rollout)
        prompts = [self.prompts[index] for index in self.sharing.part(chosen)]
        return self._completions(prompts, self.sharing.part(range(len(chosen))), rollout)

    def _completions(self, prompts: list[list[int]], rows: Sequence[int], rollout: int) -> list[Completion]:
        """What follows each prompt; `rows` are their rows in the rollout of all processes."""
        return self._draw(prompts, rows, rollout)

    def _draw(self, prompts: list[list[int]], rows: Sequence[int], rollout: int, turn: int = 0) -> list[Completion]:
        """One completion of each prompt."""
        assert self._writer is not None
        return self._writer.draw(prompts, [rng.derive(self.seed, rollout, row, turn) for row in rows], rollout)

    def _whole(self, found: list[Completion], scored: Tensor) -> tuple[list[Completion], Tensor]:
        """The texts of all processes and their rewards, shape (texts, functions), from those of this one."""
        return self.sharing.whole(found), torch.tensor(self.sharing.whole(scored.tolist()), dtype=torch.float32)

    def _scored(self, chosen: list[int], completions: list[list[int]]) -> Tensor:
        """The rewards of completions of these prompts, shape (texts, functions); nan where one does not apply."""
        given = self._asked
        columns = {name: [values[index] for index in chosen] for name, values in given.columns.items()}
        shown: list[Any] = completions if self._decode is None else [self._text_of(each) for each in completions]
        if given.are_chats:
            shown = [[{"role": "assistant", "content": text}] for text in shown]
        return self._rewards([given.shown[index] for index in chosen], shown, completions, columns)

    def _text_of(self, completion: list[int]) -> str:
        """A completion as text, without its end token."""
        if self._decode is None:
            return str(completion)
        return self._decode(completion[:-1] if completion[-1] in self._end_tokens else completion)

    @property
    def _may_end(self) -> bool:
        """Whether a text can end by something else than its length."""
        return not self._ended.never

    def _has_ended(self, completion: Completion) -> bool:
        return self._ended(completion.tokens)

    def _is_truncated(self, completion: Completion) -> bool:
        """Whether a text was cut at max_new_tokens."""
        return len(completion.tokens) == self.max_new_tokens and not self._has_ended(completion)

    def _metrics(self, completions: list[Completion], parts: Tensor) -> dict[str, float]:
        """Metrics of texts, by names without a prefix."""
        rewards, lengths = self._rewards.totals(parts), [each.length for each in completions]
        metrics = {
            "reward": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            **self._rewards.metrics(parts),
            "length": sum(lengths) / len(lengths),
            "length_min": float(min(lengths)),
            "length_max": float(max(lengths)),
        }
        if self._may_end:
            metrics["ended"] = sum(map(self._has_ended, completions)) / len(completions)
            metrics["truncated"] = sum(map(self._is_truncated, completions)) / len(completions)
        return metrics

    def _publish(self, name: str, chosen: list[int], completions: list[Completion], parts: Tensor) -> None:
        """Fires MEDIA_LOGGED for some of the texts, evenly spread, if anything subscribes to it."""
        count = min(self.log_completions, len(completions))
        if not count or not self.trainer.hears(Events.MEDIA_LOGGED):
            return
        totals = self._rewards.totals(parts).tolist()
        for number in range(count):
            at = number * len(completions) // count
            paid = zip(self._rewards.names, parts[at].tolist(), strict=True)
            of_each = ", ".join(f"{reward} {'-' if math.isnan(value) else f'{value:.6g}'}" for reward, value in paid)
            lines = (
                f"reward {totals[at]:.6g} ({of_each})",
                f"prompt: {self._prompt_text(chosen[at])[:_SHOWN]}",
                f"completion: {self._text_of(completions[at].tokens)[:_SHOWN]}",
            )
            media = MediaLogged(name=f"{name}/completion/{number + 1}", kind="text", value="\n".join(lines))
            self.trainer.fire(Events.MEDIA_LOGGED, media)

    def _prompt_text(self, index: int) -> str:
        prompt = self._asked.shown[index]
        if isinstance(prompt, str):
            return prompt
        return str(self.prompts[index]) if self._decode is None else self._decode(self.prompts[index])

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
