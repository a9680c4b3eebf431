"""Reward functions as users write them: several with weights, by keyword or position, asynchronous or not."""

from __future__ import annotations

import asyncio
import inspect
import math
import reprlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.argument_checks import is_number
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError, shortened
from pulsetrain.engine.rollouts.prompts import RESERVED

__all__ = ["Reward", "Rewards", "Weights"]

Reward = Callable[..., Any]
"""`reward(prompts, completions)` or, with keywords, `reward(completions, answer)`: a number or None for each text."""

_KEYWORD_ONLY, _VAR_KEYWORD = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD

Weights = Sequence[float] | Mapping[str, float]


class Rewards:
    """Scores texts by one function, or by several with weights.

    A function with a parameter `completions` or `completion_ids`, or with nothing but keywords, is called by keywords:
    with those of `prompts`, `completions`, `completion_ids` and the columns that it names, or with all if it takes any.
    Other functions get prompts and completions by position, and the columns that they name.

    >>> def brief(completions):
    ...     return [-len(completion) / 10 for completion in completions]
    >>> def correct(completions, answer):
    ...     return [None if a is None else float(c == a) for c, a in zip(completions, answer)]
    >>> rewards = Rewards([brief, correct], [1.0, 2.0], columns=["answer"])
    >>> parts = rewards(["1+1=", "Hi"], ["2", "Hello"], [[50], [72, 101]], {"answer": ["2", None]})
    >>> parts  # a column per function
    tensor([[-0.1000,  1.0000],
            [-0.5000,     nan]])
    >>> rewards.totals(parts)
    tensor([ 1.9000, -0.5000])

    Args:
        functions: a function, several, or several by name. Each returns a list or an array with a number for each text,
            None where it does not apply; an asynchronous one is awaited together with the others of its kind.
        weights: of the functions, in their order or by name; None gives each 1.0.
        columns: the names of the columns that are given with every call.
        place: the start of an error message.

    Raises:
        ConfigurationError: a name is missing or used twice, a weight is not finite, all are 0, a function needs a
            column that does not exist, or it does not take prompts and completions.
        ArgumentTypeError: not functions.
    """

    def __init__(
        self,
        functions: Reward | Sequence[Reward] | Mapping[str, Reward],
        weights: Weights | None = None,
        columns: Collection[str] = (),
        place: str = "TextRollouts",
    ) -> None:
        self._place = place
        self.are_several: bool = not callable(functions)  # whether each has metrics of its own
        named = self._named(functions)
        self._judges = [_Judge.of(name, function) for name, function in named]
        for judge in self._judges:
            lacking = [name for name in judge.required if name not in columns and name not in RESERVED]
            if lacking:
                has = f"with the columns {', '.join(map(repr, columns))}" if columns else "without columns"
                rule = (
                    f"the function needs {', '.join(map(repr, lacking))}, and the prompts are {has}; give them as "
                    "{'prompt': ..., " + f"{lacking[0]!r}: ...}}"
                )
                raise ConfigurationError(rule, place, reward=judge.name)
            misfit = judge.misfit(columns)
            if misfit:
                rule = f"it cannot be called ({misfit}); let it take prompts and completions, or 'completions' by name"
                raise ConfigurationError(rule, place, reward=judge.name)
        self.names: tuple[str, ...] = tuple(judge.name for judge in self._judges)
        self.weights: Tensor = torch.tensor(self._checked(weights), dtype=torch.float32)

    def _named(self, functions: Any) -> list[tuple[str, Reward]]:
        if callable(functions):
            return [(_name_of(functions), functions)]
        if isinstance(functions, Mapping):
            named = list(functions.items())
        elif isinstance(functions, (list, tuple)):
            named = [(_name_of(each), each) for each in functions]
        else:
            named = []
        if not named or not all(callable(function) for _, function in named):
            rule = "needs a function of prompts and completions, a list of functions, or a mapping name -> function"
            raise ArgumentTypeError(rule, self._place, reward=shortened(functions))
        names = [name for name, _ in named]
        for name in names:
            if not isinstance(name, str) or not name or name.startswith("<") or names.count(name) > 1:
                rule = f"each function needs a name of its own, and these are {names}; pass {{'name': function, ...}}"
                raise ConfigurationError(rule, self._place, reward=...)
        return named

    def _checked(self, weights: Weights | None) -> list[float]:
        if weights is None:
            return [1.0] * len(self.names)
        given: Any = weights
        if isinstance(given, Mapping) and set(given) == set(self.names):
            given = [given[name] for name in self.names]
        if not isinstance(given, (list, tuple)) or len(given) != len(self.names) or not all(map(is_number, given)):
            rule = f"needs a finite number for each of {', '.join(self.names)}"
            raise ConfigurationError(rule, self._place, reward_weights=shortened(weights))
        if not any(given):
            raise ConfigurationError("all are 0: no text would be better", self._place, reward_weights=weights)
        return [float(each) for each in given]

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Tensor:
        """The rewards on the host, shape (texts, functions), float32; nan where a function does not apply.

        Raises:
            TypeError: a function returned something other than numbers.
            ValueError: a function returned too few or too many, or one that is not finite, or no function applies to a
                text. Each names the function and the text.
            Exception: that of a function, with a note that names it.
        """
        count = len(completions)
        given: dict[str, Sequence[Any]] = {"completion_ids": completion_ids, **columns}
        found: list[Any] = []
        try:
            for judge in self._judges:
                try:
                    found.append(judge.call(prompts, completions, given))
                except Exception as error:
                    self._note(error, judge.name, count)
                    raise
            waited = {index: each for index, each in enumerate(found) if inspect.isawaitable(each)}
            if waited:
                results = _awaited([self._await(each, self.names[index], count) for index, each in waited.items()])
                for index, result in zip(waited, results, strict=True):
                    found[index] = result
        finally:
            for each in found:
                if inspect.iscoroutine(each):
                    each.close()  # of one that was never awaited, since another function raised
        parts = torch.stack([self._numbers(name, each, count) for name, each in zip(self.names, found, strict=True)], 1)
        lost = parts.isnan().all(1)
        if lost.any():
            index = int(lost.nonzero()[0])
            raise ValueError(
                f"{self._place}: no reward applies to text {index} of {count}, for the prompt "
                f"{reprlib.repr(prompts[index])}: {' and '.join(map(repr, self.names))} returned None; let one of them "
                "return a number"
            )
        return parts

    def totals(self, parts: Tensor) -> Tensor:
        """The weighted sum of the rewards that apply to each text, shape (texts,)."""
        return torch.where(parts.isnan(), 0.0, parts * self.weights).sum(1)

    def metrics(self, parts: Tensor) -> dict[str, float]:
        """The mean and the standard deviation of each of several functions over the texts that it applies to."""
        found: dict[str, float] = {}
        for name, values in zip(self.names, parts.T, strict=True) if self.are_several else ():
            scored = values[~values.isnan()]
            if len(scored):
                found[f"reward/{name}"] = scored.mean().item()
                found[f"reward_std/{name}"] = scored.std(correction=0).item()
        return found

    def _note(self, error: Exception, name: str, count: int) -> None:
        error.add_note(f"in {self._place}, in the reward {name!r} of {count} texts")

    async def _await(self, given: Awaitable[Any], name: str, count: int) -> Any:
        try:
            return await given
        except Exception as error:
            self._note(error, name, count)
            raise

    def _numbers(self, name: str, given: Any, count: int) -> Tensor:
        """A function's rewards, shape (texts,); nan in place of None."""
        values = given.tolist() if hasattr(given, "tolist") and not isinstance(given, Tensor) else given
        missing = torch.zeros(count, dtype=torch.bool)
        if isinstance(values, (list, tuple)) and len(values) == count:
            missing = torch.tensor([each is None for each in values], dtype=torch.bool)
            values = [0.0 if each is None else each for each in values]
        try:
            rewards = torch.as_tensor(values, dtype=torch.float32, device="cpu").detach()
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"{self._place}: the reward {name!r} returned {reprlib.repr(given)}; needs a list of numbers, one for "
                f"each of the {count} texts, and None where it does not apply"
            ) from None
        if rewards.shape != (count,):
            raise ValueError(
                f"{self._place}: the reward {name!r} returned numbers of shape {tuple(rewards.shape)} for {count} "
                "texts; needs one for each"
            )
        wrong = (~rewards.isfinite()).nonzero()
        if len(wrong):
            index = int(wrong[0])
            raise ValueError(
                f"{self._place}: the reward {name!r} returned {rewards[index].item()} for text {index}: needs finite "
                f"numbers, and {len(wrong)} of {count} are not; return 0.0 there, or None where it does not apply"
            )
        return torch.where(missing, math.nan, rewards)


@dataclass(frozen=True, slots=True)
class _Judge:
    """A reward function, and how it is called."""

    name: str
    function: Reward
    signature: inspect.Signature | None  # None for a function that is not written in Python
    by_keyword: bool
    named: frozenset[str]  # the keywords that it names
    takes_any: bool  # whether it takes keywords that it does not name
    required: tuple[str, ...]  # keywords without a default

    @classmethod
    def of(cls, name: str, function: Reward) -> _Judge:
        try:  # the __call__ of a module takes anything, and its forward may not
            signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
        except (TypeError, ValueError):
            signature = None
        parameters = list(signature.parameters.values()) if signature else []
        kinds = {each.kind for each in parameters}
        placed = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        keywords = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        by_name = any(each.name in ("completions", "completion_ids") for each in keywords)
        by_keyword = by_name or (bool(kinds) and kinds <= {_KEYWORD_ONLY, _VAR_KEYWORD})
        if not by_keyword:
            keywords = [each for each in keywords if each not in placed[:2]]
        required = tuple(each.name for each in keywords if each.default is each.empty)
        named = frozenset(each.name for each in keywords)
        return cls(name, function, signature, by_keyword, named, _VAR_KEYWORD in kinds, required)

    def misfit(self, columns: Collection[str]) -> str:
        """Why the function cannot be called with these columns; empty if it can."""
        placed, named = self._arguments([], [], dict.fromkeys((*RESERVED[2:], *columns), ()))
        try:
            if self.signature is not None:
                self.signature.bind(*placed, **named)
        except TypeError as error:
            return str(error)
        return ""

    def call(self, prompts: Sequence[Any], completions: Sequence[Any], more: Mapping[str, Sequence[Any]]) -> Any:
        placed, named = self._arguments(prompts, completions, more)
        # copies: a function may change its arguments, but not the texts that are trained on, nor those of another
        return self.function(*map(_copied, placed), **{name: _copied(each) for name, each in named.items()})

    def _arguments(
        self, prompts: Sequence[Any], completions: Sequence[Any], more: Mapping[str, Sequence[Any]]
    ) -> tuple[tuple[Sequence[Any], ...], dict[str, Sequence[Any]]]:
        """What the function gets by position, and by keyword."""
        if self.by_keyword:
            given = {"prompts": prompts, "completions": completions, **more}
            return (), {name: each for name, each in given.items() if self._takes(name)}
        named = {name: each for name, each in more.items() if name in self.named}
        if self.takes_any:  # not completion_ids: what takes anything may pass it on to a function that does not
            named |= {name: each for name, each in more.items() if name not in RESERVED}
        return (prompts, completions), named

    def _takes(self, name: str) -> bool:
        return self.takes_any or name in self.named


def _copied(values: Sequence[Any]) -> list[Any]:
    """A new list, with new lists of tokens or of messages in it."""
    return [
        [dict(part) if isinstance(part, Mapping) else part for part in each] if isinstance(each, list) else each
        for each in values
    ]


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _awaited(given: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results, awaited together; the first exception ends the others."""

    async def together() -> list[Any]:
        return await asyncio.gather(*given)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(together())
    with ThreadPoolExecutor(1) as pool:  # this thread has a loop that runs already, as in a notebook
        return pool.submit(asyncio.run, together()).result()
