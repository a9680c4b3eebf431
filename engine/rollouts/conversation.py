"""Rollouts of several turns: an environment answers what the policy writes, and only the policy's tokens are learnt."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from torch import Tensor

from pulsetrain.engine.argument_checks import check_type, check_whole_number
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.errors import ConfigurationError, refused
from pulsetrain.engine.rollouts.base import PolicyTrainer
from pulsetrain.engine.rollouts.completions import Completion
from pulsetrain.engine.rollouts.text import Reward, TextRollouts

__all__ = ["ConversationRollouts", "TextEnvironment"]


class TextEnvironment(Protocol):
    """What the policy converses with; all texts are token ids."""

    def reset(self, prompt: list[int]) -> Sequence[int]:
        """Begins a conversation; returns what stands between the prompt and the policy's first turn, often nothing."""

    def step(self, completion: list[int]) -> tuple[Sequence[int], float, bool]:
        """Answers a turn of the policy: (observation, reward, done).

        The observation is all that the policy sees before its next turn, so it includes the marks of a chat template.
        Where `done` is true, it is not used.
        """


@dataclass(frozen=True)
class _Conversation(Completion):
    """A completion of several turns."""

    turns: int = 1
    ended: bool = False  # by the environment, and not for want of turns or of room


class ConversationRollouts(TextRollouts):
    """Conversations of the policy with an environment, whose reward is the sum of those of its turns.

    All conversations of a rollout take their turns together. One ends when its environment says so, after `max_turns`,
    or when another turn might not fit into `max_length`; its reward is then what it has received so far. The strategy
    learns from the tokens that the policy wrote. In PPO's advantages, the tokens of the environment take no time.

    The metrics are those of `TextRollouts`, with "rollout/length" in tokens that the policy wrote, "rollout/turns", and
    "rollout/ended", the share of conversations that their environment ended.

    >>> class Guess:  # the number after the prompt's; three attempts
    ...     def reset(self, prompt):
    ...         self.number, self.left = prompt[-1] + 1, 3
    ...         return []
    ...     def step(self, completion):
    ...         self.left -= 1
    ...         right = completion == [self.number]
    ...         return [9], float(right), right or self.left == 0  # 9 says: once more
    >>> rollouts = ConversationRollouts([[1], [4]], Guess, max_new_tokens=1, max_length=6, prompts_per_rollout=2)
    >>> rollouts.max_turns
    8

    Args:
        prompts: as of `TextRollouts`. The environment gets the token ids, the same for a group of completions.
        environment: called for an environment of each conversation, see `TextEnvironment`.
        reward: functions as of `TextRollouts`, of all that follows each prompt. The reward of the environment is the
            first of several, with the name "environment_reward", also for `reward_weights`. None leaves it alone.
        max_length: the largest number of tokens of a conversation, with its prompt and observations.
        max_turns: the largest number of the policy's turns.
        options: keywords of `TextRollouts`; `max_new_tokens` is that of one turn.

    Raises:
        ConfigurationError: a number is out of range, or the longest prompt and one turn do not fit into `max_length`.
    """

    environment: Callable[[], TextEnvironment]
    max_length: int
    max_turns: int

    def __init__(
        self,
        prompts: Sequence[Any],
        environment: Callable[[], TextEnvironment],
        reward: Reward | Sequence[Reward] | Mapping[str, Reward] | None = None,
        *,
        max_length: int,
        max_turns: int = 8,
        **options: Any,
    ) -> None:
        place = "ConversationRollouts"
        check_type(place, "environment", environment, Callable, "a function that makes an environment")
        check_whole_number(place, "max_length", max_length)
        check_whole_number(place, "max_turns", max_turns)
        self._earned: list[float] = []  # by the conversations of this process, in the latest rollout

        def environment_reward(completions: Sequence[Any]) -> list[float]:
            return list(self._earned)

        functions: Any = [environment_reward]
        if isinstance(reward, Mapping):
            functions = {"environment_reward": environment_reward, **reward}
        elif reward is None:
            functions = environment_reward
        else:
            functions += [reward] if callable(reward) else list(reward)
        super().__init__(prompts, functions, **options)
        self.environment, self.max_length, self.max_turns = environment, max_length, max_turns
        if self.staleness:
            raise refused(self, "environments converse with the current policy; pass 0", "staleness")
        if self._longest > max_length:
            rule = f"the longest prompt and one turn make {self._longest} tokens; pass at least that"
            raise refused(self, rule, "max_length")
        if self.pad_to is not None and self.pad_to < max_length:
            raise refused(self, f"rows may have {max_length} tokens; pass at least that", "pad_to")
        self._longest = max_length

    def begin(self, trainer: PolicyTrainer) -> None:
        context = trainer.strategy.context
        if context is not None and self.max_length > context + 1:
            rule = f"more than the model's context of {context} plus the token that follows; pass at most {context + 1}"
            raise refused(self, rule, "max_length")
        most, written = getattr(trainer.strategy, "max_length", None), self.max_turns * self.max_new_tokens
        written = min(written, self.max_length - min(map(len, self.prompts)))
        if most is not None and most < written:
            rule = f"the policy may write {written} tokens in one conversation; pass at least that"
            raise refused(trainer.strategy, rule, "max_length")
        super().begin(trainer)

    def _completions(self, prompts: list[list[int]], rows: Sequence[int], rollout: int) -> list[Completion]:
        talks = [_Talk(self.environment(), prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
        if len({id(talk.environment) for talk in talks}) < len(talks):
            raise ConfigurationError(
                "the function returns the same environment again; let it make a new one each time",
                "ConversationRollouts",
                environment=self.environment,
            )
        ends = getattr(talks[0].environment, "end_token", None)
        if ends is not None and ends not in self._end_tokens:
            rule = f"the environment expects turns to end with the token {ends}; pass it, alone or among others"
            raise ConfigurationError(rule, "ConversationRollouts", end_token=self.end_token)
        for talk in talks:
            talk.begin(self.max_length - self.max_new_tokens)
        agree: Callable[[bool], bool] = self.sharing.any if is_sharded(self.trainer.model) else bool
        running, turn = talks, 0
        while agree(bool(running)):
            found = self._draw([talk.text for talk in running], [talk.row for talk in running], rollout, turn)
            turn += 1
            last = turn == self.max_turns
            for talk, completion in zip(running, found, strict=True):
                talk.answer(completion, 0 if last else self.max_length - self.max_new_tokens)
            running = [talk for talk in running if not talk.over]
        self._earned = [talk.earned for talk in talks]
        return [talk.completion() for talk in talks]

    @property
    def _may_end(self) -> bool:
        return True

    def _has_ended(self, completion: Completion) -> bool:
        return isinstance(completion, _Conversation) and completion.ended

    def _is_truncated(self, completion: Completion) -> bool:
        return not self._has_ended(completion)

    def _metrics(self, completions: list[Completion], parts: Tensor) -> dict[str, float]:
        turns = [each.turns for each in completions if isinstance(each, _Conversation)]
        return {**super()._metrics(completions, parts), "turns": sum(turns) / len(turns)}


@dataclass(eq=False)
class _Talk:
    """A conversation while it is drawn."""

    environment: TextEnvironment
    prompt: list[int]
    row: int
    tokens: list[int] = field(default_factory=list)  # all that follows the prompt
    written: list[bool] = field(default_factory=list)
    log_probs: list[float] | None = None
    turns: int = 0
    earned: float = 0.0
    ended: bool = False
    over: bool = False

    @property
    def text(self) -> list[int]:
        return self.prompt + self.tokens

    def begin(self, room: int) -> None:
        """Resets the environment; another turn needs that the text has at most `room` tokens."""
        with self._named("reset()"):
            shown = self.environment.reset(list(self.prompt))
        self._observe(self._tokens("reset()", shown))
        if len(self.text) > room:
            raise ValueError(
                f"ConversationRollouts: after reset(), the conversation of row {self.row} has {len(self.text)} tokens, "
                f"and one turn fits after at most {room}; raise max_length, or let the environment write less"
            )

    def answer(self, completion: Completion, room: int) -> None:
        """Adds a turn of the policy, and what the environment answers, if another turn fits after it."""
        self.tokens += completion.tokens
        self.written += [True] * len(completion.tokens)
        if completion.log_probs is not None:
            self.log_probs = (self.log_probs or []) + completion.log_probs
        self.turns += 1
        with self._named("step()"):
            found = self.environment.step(list(completion.tokens))
        if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[1], Real):
            raise TypeError(
                f"ConversationRollouts: the environment's step() returned {reprlib.repr(found)}; needs (observation, "
                "reward, done): token ids, a number, and whether the conversation has ended"
            )
        observation, reward, done = found
        self.earned += float(reward)
        self.ended = bool(done)
        shown = [] if self.ended else self._tokens("step()", observation)
        self.over = self.ended or len(self.text) + len(shown) > room
        if not self.over:
            self._observe(shown)

    def completion(self) -> _Conversation:
        """The conversation as it is trained on."""
        return _Conversation(self.tokens, self.log_probs, self.written, self.turns, self.ended)

    def _observe(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.written += [False] * len(tokens)

    @contextmanager
    def _named(self, place: str) -> Iterator[None]:
        """Around a call of the environment: its exception gets a note that names the conversation."""
        try:
            yield
        except Exception as error:
            error.add_note(
                f"in ConversationRollouts, in the environment's {place}, conversation of row {self.row}, "
                f"after {self.turns} turns"
            )
            raise

    def _tokens(self, place: str, given: Sequence[int]) -> list[int]:
        try:
            return list(map(operator.index, given))
        except TypeError:
            raise TypeError(
                f"ConversationRollouts: the environment's {place} returned {reprlib.repr(given)} as its observation; "
                "needs token ids, a list that may be empty"
            ) from None
