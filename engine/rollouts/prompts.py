"""The prompts of rollouts: token ids, texts or chat messages, alone or in rows with further columns."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pulsetrain.engine.data.chat import encode_prompt
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError, shortened

__all__ = ["RESERVED", "Decode", "Prompts", "decoder_of", "read_prompts"]

Decode = Callable[[list[int]], str]

RESERVED = ("prompts", "completions", "completion_ids")  # what reward functions are given besides the columns


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts in the order given."""

    tokens: list[list[int]]
    shown: list[Any]  # each as reward functions get it: token ids, a text, or messages
    columns: dict[str, list[Any]]  # values by name, one for each prompt
    are_chats: bool = False


def read_prompts(place: str, prompts: Iterable[Any], tokenizer: Any = None, decode: Decode | None = None) -> Prompts:
    """The prompts with their tokens and columns.

    >>> rows = [{"prompt": [1, 2], "answer": "a"}, {"prompt": [3], "answer": "b"}]
    >>> read_prompts("TextRollouts", rows)
    Prompts(tokens=[[1, 2], [3]], shown=[[1, 2], [3]], columns={'answer': ['a', 'b']}, are_chats=False)

    Args:
        place: the start of an error message.
        prompts: each is a list of token ids, a text, a list of messages, or a mapping with one of these as "prompt".
        tokenizer: encodes texts and messages, see `pulsetrain.engine.data.chat.tokenize_chat`.
        decode: makes texts of prompts that are token ids.

    Raises:
        ConfigurationError: there is no prompt, a prompt is empty, or the rows do not have the same columns.
        ArgumentTypeError: a prompt is of another type, or needs a tokenizer.
    """
    try:
        if isinstance(prompts, (str, Mapping)):
            raise TypeError
        rows = list(prompts)
    except TypeError:
        raise _misfit(place, prompts) from None
    columns: dict[str, list[Any]] = {}
    if rows and isinstance(rows[0], Mapping):
        rows, columns = _columns(place, rows)
    kinds = [_kind(prompt) for prompt in rows]
    other = next((index for index, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        rule = f"is a prompt of {kinds[other]}, and prompts[0] of {kinds[0]}; give all of them in one form"
        raise ArgumentTypeError(rule, place, **{f"prompts[{other}]": shortened(rows[other])})
    if kinds and kinds[0] != "token ids":
        if tokenizer is None:
            raise _misfit(place, rows)
        tokens = [_encoded(place, index, prompt, tokenizer) for index, prompt in enumerate(rows)]
        shown = rows
    else:
        tokens = _numbers(place, rows)
        shown = tokens if decode is None else [decode(each) for each in tokens]
    empty = next((index for index, each in enumerate(tokens) if not each), None)
    if empty is not None or not tokens:
        given: dict[str, object] = {"prompts" if empty is None else f"prompts[{empty}]": []}
        raise ConfigurationError("needs token ids; a text starts with at least one", place, **given)
    return Prompts(tokens, shown, columns, are_chats=kinds[0] == "messages")


def decoder_of(place: str, tokenizer: Any) -> Decode:
    """The tokenizer's function from tokens to text, which leaves special tokens out if it can.

    Raises:
        ArgumentTypeError: the tokenizer has none.
        TypeError: later, if it returns something other than a text.
    """
    decode = getattr(tokenizer, "decode", None)
    if not callable(decode):
        raise ArgumentTypeError("needs an object with encode and decode", place, tokenizer=shortened(tokenizer))
    try:
        options = {"skip_special_tokens": True} if "skip_special_tokens" in inspect.signature(decode).parameters else {}
    except (TypeError, ValueError):  # a function that is not written in Python
        options = {}

    def text_of(tokens: list[int]) -> str:
        text = decode(list(tokens), **options)
        if not isinstance(text, str):
            raise TypeError(f"{place}(tokenizer): its decode returned {type(text).__name__}; needs a text")
        return text

    return text_of


def _columns(place: str, rows: list[Any]) -> tuple[list[Any], dict[str, list[Any]]]:
    names = list(rows[0])
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or set(row) != set(names):
            has = ", ".join(map(repr, row)) if isinstance(row, Mapping) else "none"
            rule = f"has the columns {has}, and prompts[0] has {', '.join(map(repr, names))}; give every row the same"
            raise ConfigurationError(rule, place, **{f"prompts[{index}]": ...})
    if "prompt" not in names:
        rule = f"the rows have the columns {', '.join(map(repr, names))}; name that of the prompts 'prompt'"
        raise ConfigurationError(rule, place, prompts=...)
    for name in RESERVED:
        if name in names:
            rule = f"reward functions get something else as {name!r}; give the column {name!r} another name"
            raise ConfigurationError(rule, place, prompts=...)
    return [row["prompt"] for row in rows], {name: [row[name] for row in rows] for name in names if name != "prompt"}


def _kind(prompt: object) -> str:
    if isinstance(prompt, str):
        return "text"
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return "messages"
    return "token ids"


def _encoded(place: str, index: int, prompt: Any, tokenizer: Any) -> list[int]:
    try:
        return encode_prompt(prompt, tokenizer)
    except Exception as error:
        error.add_note(f"in {place}, prompts[{index}]")
        raise


def _numbers(place: str, prompts: Sequence[Any]) -> list[list[int]]:
    try:
        return [[operator.index(token) for token in prompt] for prompt in prompts]
    except TypeError:
        raise _misfit(place, prompts) from None


def _misfit(place: str, prompts: object) -> ArgumentTypeError:
    return ArgumentTypeError(
        "needs a list of token ids for each prompt; texts and messages need tokenizer=, the model's tokenizer",
        place,
        prompts=shortened(prompts),
    )
