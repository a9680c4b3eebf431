"""Makes batches of answers with a preference: of pairs, and of single answers that are judged as desirable or not."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_choice, check_whole_number, is_number
from pulsetrain.engine.data.chat import ASSISTANT, Encoder, Message, Template, tokenize_chat, tokenize_prompt
from pulsetrain.engine.data.sequences import IGNORED, Example, pad_examples
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["from_preferences", "from_unpaired", "pad_pairs", "pad_unpaired"]

_SIDES = ("chosen", "rejected")


def from_preferences(
    rows: Iterable[Mapping[str, object]],
    tokenizer: Encoder | Callable[[str], object],
    *,
    template: Template | None = None,
    end: int | None = None,
    length: int | None = None,
    truncation: str | None = None,
) -> list[dict[str, object]]:
    """Converts prompts with two answers each to examples, of which `pad_pairs` makes batches for `DPOStrategy`.

    A row is a mapping with "chosen" and "rejected", and usually "prompt", in one of these forms:

    - three texts, which `tokenize_prompt` encodes;
    - a prompt that is a list of chat messages, and answers that are texts or lists of one message of the assistant;
    - two conversations that differ in their last message, and no prompt. `tokenize_chat` encodes them.

    >>> rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "11"}]
    >>> (example,) = from_preferences(rows, str.encode, end=0)
    >>> example["chosen_input_ids"], example["rejected_labels"]
    ([49, 43, 49, 61, 50, 0], [-100, -100, -100, -100, 49, 49, 0])

    Args:
        rows: a row's "margin", a number, is kept; other fields are dropped.
        tokenizer: see `tokenize_chat`.
        template: see `tokenize_chat`; for messages.
        end: see `tokenize_prompt`; for texts.
        length: the largest number of tokens of a prompt with an answer.
        truncation: what is cut from longer rows: the beginning of the "prompt", of which both answers keep the same
            part, or the end of the "answer". By default they are an error.

    Returns:
        "chosen_input_ids", "chosen_labels", "rejected_input_ids" and "rejected_labels", lists of integers; the labels
        are IGNORED in the prompt.

    Raises:
        ConfigurationError: an option is out of range, or conversations do not differ in their last message alone.
        TypeError: a row lacks a field, or has one of the wrong type; a note gives its index.
        ValueError: a row is too long, or nothing would be trained on.
    """
    place = "from_preferences"
    _check_cut(place, length, truncation)
    found: list[dict[str, object]] = []
    for index, row in enumerate(rows):
        name = f"{place}(rows[{index}])"
        prompt, *answers = _read(name, row, _SIDES)
        if prompt is None:
            prompt, answers = _shared_prompt(name, answers)
        sides = {
            side: _tokenized(name, prompt, answer, tokenizer, template, end)
            for side, answer in zip(_SIDES, answers, strict=True)
        }
        cut = _cut(name, sides, length, truncation)
        example: dict[str, object] = {
            f"{side}_{field}": values for side, fields in cut.items() for field, values in fields.items()
        }
        if row.get("margin") is not None:
            example["margin"] = _number(name, "margin", row["margin"])
        found.append(example)
    return found


def from_unpaired(
    rows: Iterable[Mapping[str, object]],
    tokenizer: Encoder | Callable[[str], object],
    *,
    template: Template | None = None,
    end: int | None = None,
    length: int | None = None,
    truncation: str | None = None,
) -> list[dict[str, object]]:
    """Converts prompts with a judged answer each to examples, of which `pad_unpaired` makes batches for `KTOStrategy`.

    A row is a mapping with "prompt", "completion" and "label", which is true for a desirable completion. Prompts and
    completions have the forms of `from_preferences`; a conversation without a prompt is a "completion", too.

    >>> (example,) = from_unpaired([{"prompt": "a", "completion": "b", "label": True}], str.encode)
    >>> example
    {'input_ids': [97, 98], 'labels': [-100, 98], 'desirable': True}

    Args:
        rows: see above.
        tokenizer: see `tokenize_chat`.
        template: see `tokenize_chat`; for messages.
        end: see `tokenize_prompt`; for texts.
        length: the largest number of tokens of a prompt with its completion.
        truncation: see `from_preferences`.

    Returns:
        "input_ids" and "labels", lists of integers, and "desirable".

    Raises:
        ConfigurationError: an option is out of range.
        TypeError: a row lacks a field, or has one of the wrong type; a note gives its index.
        ValueError: a row is too long, or nothing would be trained on.
    """
    place = "from_unpaired"
    _check_cut(place, length, truncation)
    found: list[dict[str, object]] = []
    for index, row in enumerate(rows):
        name = f"{place}(rows[{index}])"
        prompt, completion, label = _read(name, row, ("completion", "label"))
        if prompt is None:
            prompt, (completion,) = _shared_prompt(name, [completion])
        tokenized = {"completion": _tokenized(name, prompt, completion, tokenizer, template, end)}
        found.append(
            {**_cut(name, tokenized, length, truncation)["completion"], "desirable": _boolean(name, "label", label)}
        )
    return found


def pad_pairs(
    examples: Sequence[Mapping[str, object]], *, pad_token: int = 0, length: int | None = None, multiple_of: int = 1
) -> dict[str, Tensor]:
    """Pads pairs of answers on the right to rows of one length; a DataLoader's `collate_fn`.

    >>> pair = {"chosen_input_ids": [5, 6], "chosen_labels": [-100, 6]}
    >>> pair |= {"rejected_input_ids": [5, 7, 8], "rejected_labels": [-100, 7, 8]}
    >>> pad_pairs([pair, pair], length=4)["chosen_labels"]
    tensor([[-100,    6, -100, -100],
            [-100,    6, -100, -100]])

    Args:
        examples: as `from_preferences` makes them. "margin" and "reference_..." are numbers.
        pad_token: see `pad_examples`, as for the others.
        length: of every row; the default is that of the longest answer of each side.
        multiple_of: rounds the length up.

    Returns:
        The fields of the examples: tokens and labels int64, shape (pairs, length); numbers float32, shape (pairs,).

    Raises:
        ConfigurationError: an option is out of range.
        TypeError: an example lacks a field, or has one of the wrong type.
        ValueError: there is no example, or an answer is empty, too long, or has no trained token.
    """
    batch: dict[str, Tensor] = {}
    for side in _SIDES:
        sides = [_side(f"pad_pairs(examples[{index}])", each, f"{side}_") for index, each in enumerate(examples)]
        padded = pad_examples(sides, pad_token=pad_token, length=length, multiple_of=multiple_of)
        batch |= {f"{side}_{name}": values for name, values in padded.items()}
    return batch | _numbers("pad_pairs", examples)


def pad_unpaired(
    examples: Sequence[Mapping[str, object]], *, pad_token: int = 0, length: int | None = None, multiple_of: int = 1
) -> dict[str, Tensor]:
    """Pads judged answers on the right to rows of one length; a DataLoader's `collate_fn`.

    The batch also has each prompt with the answer to the prompt before it, for the divergence that `KTOStrategy`
    estimates: "kl_input_ids" and "kl_labels". A single example is combined with itself. Shuffle the examples, so that
    answers to one prompt do not follow each other.

    >>> examples = [{"input_ids": [1, 2], "labels": [-100, 2], "desirable": True},
    ...             {"input_ids": [3, 4, 5], "labels": [-100, 4, 5], "desirable": False}]
    >>> batch = pad_unpaired(examples)
    >>> batch["kl_input_ids"], batch["desirable"]
    (tensor([[1, 4, 5],
            [3, 2, 0]]), tensor([ True, False]))

    Args:
        examples: as `from_unpaired` makes them. "reference_..." are numbers.
        pad_token: see `pad_examples`, as for the others.
        length: of every row; an answer combined with a longer prompt is cut at its end.
        multiple_of: rounds the length up.

    Returns:
        Tokens and labels int64, shape (rows, length); "desirable", booleans, and numbers float32, shape (rows,).

    Raises:
        ConfigurationError: an option is out of range.
        TypeError: an example lacks a field, or has one of the wrong type.
        ValueError: there is no example, or an answer is empty, too long, or has no trained token.
    """
    place = "pad_unpaired"
    rows = [_side(f"{place}(examples[{index}])", each, "") for index, each in enumerate(examples)]
    options = {"pad_token": pad_token, "length": length, "multiple_of": multiple_of}
    batch = pad_examples(rows, **options)  # type: ignore[arg-type]  # of the options, by name
    cut = None if length is None else "right"
    padded = pad_examples(_mismatched(rows), **options, truncation=cut)  # type: ignore[arg-type]
    batch |= {f"kl_{name}": values for name, values in padded.items()}
    batch["desirable"] = torch.tensor([
        _boolean(f"{place}(examples[{index}])", "desirable", each.get("desirable"))
        for index, each in enumerate(examples)
    ])  # fmt: skip
    return batch | _numbers(place, examples)


# ------------------------------------------------------------------------------------------------------------ rows


def _read(name: str, row: object, fields: Sequence[str]) -> list[object]:
    """The prompt of a row, or None, and these fields.

    Raises:
        TypeError: the row lacks one.
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"{name}: needs a mapping with {', '.join(map(repr, fields))}, not {type(row).__name__}")
    for field in fields:
        if row.get(field) is None:
            raise TypeError(f"{name}: lacks {field!r}, it has {', '.join(map(str, row)) or 'no field'}")
    return [row.get("prompt"), *(row[field] for field in fields)]


def _shared_prompt(name: str, answers: Sequence[object]) -> tuple[object, list[object]]:
    """All messages but the last, which conversations without a prompt have in common, and the last ones."""
    for each in answers:
        if isinstance(each, str) or not isinstance(each, Sequence) or len(each) < 2:
            raise TypeError(f"{name}: lacks 'prompt'; only conversations of 2 messages or more contain their own")
    conversations = [list(each) for each in answers if isinstance(each, Sequence)]
    prompt = conversations[0][:-1]
    if any(each[:-1] != prompt for each in conversations):
        raise ConfigurationError(
            f"{name}: needs conversations that differ in their last message alone; pass what they have in common as "
            "'prompt', and one message of the assistant as each answer"
        )
    return prompt, [each[-1:] for each in conversations]


def _tokenized(
    name: str,
    prompt: object,
    answer: object,
    tokenizer: Encoder | Callable[[str], object],
    template: Template | None,
    end: int | None,
) -> dict[str, list[int]]:
    """The tokens and labels of a prompt with one of its answers."""
    try:
        if isinstance(prompt, str) and isinstance(answer, str):
            if template is not None:
                rule = "texts are not written by a template; leave it out, or pass prompts as lists of messages"
                raise ConfigurationError(rule, name.partition("(")[0], template=template)
            return tokenize_prompt(prompt, answer, tokenizer, end=end)
        messages = _messages(prompt, answer)
        if end is not None:
            rule = "a conversation ends with the marks of its template; leave it out"
            raise ConfigurationError(rule, name.partition("(")[0], end=end)
        return tokenize_chat(messages, tokenizer, template=template, train_on="last")
    except Exception as error:  # a tokenizer raises whatever it raises
        error.add_note(f"in {name}")
        raise


def _messages(prompt: object, answer: object) -> list[Message]:
    reply = [{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else answer
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        raise TypeError(f"needs a prompt that is a list of messages, as the answer is, not {type(prompt).__name__}")
    if not isinstance(reply, Sequence) or len(reply) != 1 or not isinstance(reply[0], Mapping):
        raise TypeError("needs an answer that is a text, or a list of one message of the assistant")
    if reply[0].get("role") != ASSISTANT:
        raise ValueError(f"needs an answer of the role {ASSISTANT!r}, not {reply[0].get('role')!r}")
    return [*prompt, *reply]


def _check_cut(place: str, length: int | None, truncation: str | None) -> None:
    check_whole_number(place, "length", length, at_least=2, or_none=True)
    if truncation is not None:
        check_choice(place, "truncation", truncation, ("prompt", "answer"))
        if length is None:
            raise ConfigurationError("needs a length to cut to; pass length=", place, truncation=truncation)


def _cut(
    name: str, sides: Mapping[str, dict[str, list[int]]], length: int | None, truncation: str | None
) -> dict[str, dict[str, list[int]]]:
    """The answers to a prompt, of at most this length."""
    longest = max(len(each["input_ids"]) for each in sides.values())
    if length is None or longest <= length:
        return dict(sides)
    if truncation is None:
        raise ValueError(
            f"{name}: has {longest} tokens, more than length={length}; pass a greater length, or truncation='prompt' "
            "to cut off the beginning of the prompt, 'answer' the end of the answer"
        )
    prompt = min(_prompt_length(each["labels"]) for each in sides.values())
    if truncation == "answer":
        if prompt >= length:
            raise ValueError(
                f"{name}: its prompt of {prompt} tokens fills length={length}; pass a greater length, or "
                "truncation='prompt'"
            )
        part = slice(length)
    else:
        if longest - length >= prompt:
            raise ValueError(
                f"{name}: its answer of {longest - prompt} tokens leaves no room for the prompt in length={length}; "
                "pass a greater length, or truncation='answer'"
            )
        part = slice(longest - length, None)
    return {side: {field: values[part] for field, values in each.items()} for side, each in sides.items()}


def _prompt_length(labels: Sequence[int]) -> int:
    """How many tokens there are before the first that is trained on."""
    return next((number for number, label in enumerate(labels) if label != IGNORED), len(labels))


# --------------------------------------------------------------------------------------------------------- examples


def _side(name: str, example: object, prefix: str) -> dict[str, object]:
    """The tokens and labels under names with this prefix."""
    if not isinstance(example, Mapping):
        raise TypeError(f"{name}: needs a mapping, not {type(example).__name__}")
    for field in ("input_ids", "labels"):
        if f"{prefix}{field}" not in example:
            raise TypeError(
                f"{name}: lacks '{prefix}{field}', it has {', '.join(map(str, example)) or 'no field'}; "
                "from_preferences and from_unpaired make such examples"
            )
    return {field: example[f"{prefix}{field}"] for field in ("input_ids", "labels")}


def _mismatched(rows: Sequence[Example]) -> list[Example]:
    """Each prompt with the answer to the prompt before it, and the first with the answer to the last."""
    read = [{field: torch.as_tensor(values).tolist() for field, values in each.items()} for each in rows]
    starts = [_prompt_length(each["labels"]) for each in read]
    found: list[Example] = []
    for number, each in enumerate(read):
        other, start = read[number - 1], starts[number - 1]
        found.append({
            "input_ids": each["input_ids"][: starts[number]] + other["input_ids"][start:],
            "labels": [IGNORED] * starts[number] + other["labels"][start:],
        })  # fmt: skip
    return found


def _numbers(place: str, examples: Sequence[Mapping[str, object]]) -> dict[str, Tensor]:
    """The margins and the reference's log-probabilities."""
    given = (name for each in examples for name in each)
    names = list(dict.fromkeys(name for name in given if name == "margin" or name.startswith("reference_")))
    lacking = [index for index, each in enumerate(examples) if any(each.get(name) is None for name in names)]
    if lacking:
        raise TypeError(f"{place}(examples[{lacking[0]}]): lacks one of {', '.join(names)}, which others have")
    return {
        name: torch.tensor([
            _number(f"{place}(examples[{index}])", name, each[name]) for index, each in enumerate(examples)
        ])
        for name in names
    }  # fmt: skip


def _number(name: str, field: str, value: object) -> float:
    """A finite number.

    Raises:
        TypeError: it is something else.
    """
    number = _scalar(value)
    if not is_number(number):
        raise TypeError(f"{name}: {field!r} is {reprlib.repr(value)}; needs a finite number")
    return float(number)


def _boolean(name: str, field: str, value: object) -> bool:
    """A boolean.

    Raises:
        TypeError: it is something else.
    """
    boolean = _scalar(value)
    if not isinstance(boolean, bool):
        raise TypeError(f"{name}: {field!r} is {reprlib.repr(value)}; needs True or False")
    return boolean


def _scalar(value: Any) -> object:
    """The only element of an array without dimensions, as rows of pandas and datasets have them, else the value."""
    return value.item() if getattr(value, "shape", None) == () else value
