"""Chat messages and prompts to tokens, with labels that say which of them are to be learnt."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.errors import ConfigurationError, unknown_name

__all__ = ["Template", "chatml", "tokenize_chat", "tokenize_prompt"]

Template = Callable[[str, str], tuple[str, str]]
"""(role, content) -> (text that is given, text that is learnt where the role is trained on)."""

ASSISTANT = "assistant"


def chatml(role: str, content: str) -> tuple[str, str]:
    """The role is given; the content and the mark that ends it are learnt."""
    return f"<|im_start|>{role}\n", f"{content}<|im_end|>\n"


def tokenize_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    template: Template | None = None,
    train_on: str = "assistant",
) -> dict[str, list[int]]:
    """A conversation as an example, whose labels are IGNORED wherever the model is not to learn to speak.

    Without `template`, a tokenizer that has a chat template applies it, and of a trained turn what stands behind the
    generation prompt is learnt. With one, or with a tokenizer that has none, each turn is what `template` makes of it:
    given and learnt text are encoded apart, so that no token spans both, and no token is added to those of the text.

    Args:
        messages: each a mapping with "role" and "content".
        tokenizer: a tokenizer of transformers, one of tokenizers, anything with an `encode`, or a function from text to
            tokens.
        template: text of a turn; by default `chatml`, where the tokenizer has no chat template.
        train_on: "assistant" for each of its turns, "last" for the last of them, "all" for the turns of every role; the
            tokenizer's own template then makes headers learnt, too.

    Returns:
        "input_ids" and "labels", of the same length; see `pulsetrain.engine.data.sequences`.

    Raises:
        ConfigurationError: another `train_on`, or a chat template that writes a turn otherwise once others follow; it
            names the turn.
        TypeError: a message, a text or tokens of the wrong kind.
        ValueError: there is nothing to learn.
    """
    if train_on not in ("assistant", "last", "all"):
        raise unknown_name("tokenize_chat", "train_on", train_on, ("assistant", "last", "all"))
    _check_messages(messages)
    trained = [number for number, each in enumerate(messages) if train_on == "all" or each["role"] == ASSISTANT]
    if train_on == "last":
        trained = trained[-1:]
    if not trained:
        roles = ", ".join(sorted({repr(message["role"]) for message in messages}))
        raise ValueError(
            f"tokenize_chat(train_on={train_on!r}): nothing to learn, there is no turn of {ASSISTANT!r} among those of "
            f"{roles}; rename the role, pass train_on='all', or leave the conversation out"
        )
    if template is None and getattr(tokenizer, "chat_template", None) and hasattr(tokenizer, "apply_chat_template"):
        if train_on == "all":
            tokens = _apply_chat_template(tokenizer, messages)
            labels = list(tokens)
        else:
            tokens, labels = _by_prefixes(messages, tokenizer, trained)
    else:
        tokens, labels = _by_segments(messages, tokenizer, template or chatml, trained)
    _require_learnable("tokenize_chat(messages)", labels, "give a trained turn some content")
    return {"input_ids": tokens, "labels": labels}


def tokenize_prompt(prompt: str, completion: str, tokenizer: Any, *, end: int | None = None) -> dict[str, list[int]]:
    """A prompt that is given and a completion that is learnt, as an example.

    They are encoded apart, so that no token spans both, and no token is added to those of the text but `end`.

    Args:
        tokenizer: see `tokenize_chat`.
        end: token that ends the completion; it is learnt, too.

    Returns:
        "input_ids" and "labels", of the same length; see `pulsetrain.engine.data.sequences`.

    Raises:
        ConfigurationError: an `end` that is the number of no token.
        TypeError: a text or tokens of the wrong kind.
        ValueError: there is nothing to learn.
    """
    if end is not None and (isinstance(end, bool) or not isinstance(end, int) or end < 0):
        raise ConfigurationError(f"tokenize_prompt(end={end!r}): needs the number of a token, 0 or more")
    for name, text in (("prompt", prompt), ("completion", completion)):
        if not isinstance(text, str):
            raise TypeError(f"tokenize_prompt({name}): needs text, not {type(text).__name__}")
    encode = _encoder("tokenize_prompt", tokenizer)
    given, learnt = encode(prompt), encode(completion)
    if end is not None:
        learnt.append(end)
    labels = [IGNORED] * len(given) + learnt
    _require_learnable("tokenize_prompt(completion)", labels, "give the completion some text, or pass end=")
    return {"input_ids": given + learnt, "labels": labels}


def _by_segments(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, template: Template, trained: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Tokens and labels of turns that a template writes, each segment encoded by itself."""
    encode = _encoder("tokenize_chat", tokenizer)
    tokens: list[int] = []
    labels: list[int] = []
    for number, message in enumerate(messages):
        if not isinstance(message["content"], str) or message.get("tool_calls"):
            what = "'tool_calls'" if message.get("tool_calls") else f"a content of {type(message['content']).__name__}"
            raise TypeError(
                f"tokenize_chat(messages[{number}]): a template writes the text of a turn, and this one has {what}; "
                "write it as text, or use a tokenizer with a chat template"
            )
        texts = template(message["role"], message["content"])
        if not isinstance(texts, tuple) or [type(text) for text in texts] != [str, str]:
            raise TypeError(
                f"tokenize_chat(template): for messages[{number}] it gave {texts!r}; let it return two texts, what is "
                "given and what is learnt"
            )
        given, learnt = map(encode, texts)
        tokens += given + learnt
        labels += [IGNORED] * len(given) + (learnt if number in trained else [IGNORED] * len(learnt))
    return tokens, labels


def _by_prefixes(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, trained: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Tokens and labels of what the tokenizer's chat template writes: a turn is what it adds to those before."""
    if trained[0] == 0:
        raise ConfigurationError(
            f"tokenize_chat(messages[0]): the conversation begins with {ASSISTANT!r}, and a chat template has no "
            "generation prompt without a message; put one before it, or pass template="
        )
    remedy = "pass template=, such as pulsetrain.engine.data.chat.chatml" + (
        ", or train_on='last'" if len(trained) > 1 else ""
    )
    tokens: list[int] = []
    labels: list[int] = []
    for number in trained:
        given = _apply_chat_template(tokenizer, messages[:number], add_generation_prompt=True)
        _require_prefix(tokens, given, number - 1, remedy)
        labels += [IGNORED] * (len(given) - len(tokens))
        tokens = _apply_chat_template(tokenizer, messages[: number + 1])
        _require_prefix(given, tokens, number, remedy)
        labels += tokens[len(given) :]
    if trained[-1] + 1 < len(messages):
        given, tokens = tokens, _apply_chat_template(tokenizer, messages)
        _require_prefix(given, tokens, len(messages) - 1, remedy)
        labels += [IGNORED] * (len(tokens) - len(given))
    return tokens, labels


def _apply_chat_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    try:
        result = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **options)
    except Exception as error:  # a template may refuse roles, or a conversation that ends with one
        error.add_note(f"in tokenize_chat, the chat template applied to messages[:{len(messages)}]")
        raise
    return _as_tokens("tokenize_chat", "apply_chat_template", result)


def _require_prefix(shorter: list[int], longer: list[int], number: int, remedy: str) -> None:
    """Refuses a template that does not merely add to what it wrote before: which tokens are learnt would be a guess."""
    if longer[: len(shorter)] == shorter:
        return
    pairs = zip(shorter, longer, strict=False)
    first = next((at for at, (old, new) in enumerate(pairs) if old != new), min(len(shorter), len(longer)))
    raise ConfigurationError(
        f"tokenize_chat(messages[{number}]): this turn changes what the tokenizer's chat template wrote before it, "
        f"from token {first} on ({shorter[first : first + 4]} became {longer[first : first + 4]}), so that it cannot "
        f"be told which tokens are learnt; {remedy}"
    )


# ------------------------------------------------------------------------------------------------ tokenizers


def _encoder(place: str, tokenizer: Any) -> Callable[[str], list[int]]:
    """The tokenizer as a function from text to tokens, which adds none to those of the text."""
    encode = getattr(tokenizer, "encode", tokenizer)
    if not callable(encode):
        raise TypeError(
            f"{place}(tokenizer={type(tokenizer).__name__}): needs an object with an encode, or a function from text "
            "to a list of tokens"
        )
    try:
        parameters: Mapping[str, Any] = inspect.signature(encode).parameters
    except (TypeError, ValueError):  # of a function that is not written in Python
        parameters = {}
    options: dict[str, Any] = {}
    if "add_special_tokens" in parameters:  # transformers, tokenizers
        options["add_special_tokens"] = False
    elif "allowed_special" in parameters:  # tiktoken, which otherwise refuses text with the marks of a template
        options["allowed_special"] = "all"

    def tokens_of(text: str) -> list[int]:
        return _as_tokens(place, "tokenizer", encode(text, **options))

    return tokens_of


def _as_tokens(place: str, name: str, result: Any) -> list[int]:
    """A list of integers from what a tokenizer returned: such a list, an array, bytes, or an object that holds one."""
    tokens = getattr(result, "ids", result)
    if isinstance(tokens, Mapping) and "input_ids" in tokens:
        tokens = tokens["input_ids"]
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    try:
        if isinstance(tokens, (list, tuple, bytes)):
            return list(map(index, tokens))
    except TypeError:
        pass
    raise TypeError(f"{place}({name}): it gave {reprlib.repr(result)}; needs a list of tokens, which are integers")


# ---------------------------------------------------------------------------------------------------- checks


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(
            f"tokenize_chat(messages): needs a list of messages, each with 'role' and 'content', not "
            f"{type(messages).__name__}"
        )
    if not messages:
        raise ValueError("tokenize_chat(messages=[]): needs 1 message or more; leave the conversation out")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            given = ", ".join(map(repr, message)) if isinstance(message, Mapping) else type(message).__name__
            raise TypeError(f"tokenize_chat(messages[{number}]): needs 'role' and 'content', not {given or 'no field'}")
        if not isinstance(message["role"], str):
            raise TypeError(f"tokenize_chat(messages[{number}]): a role is text, not {type(message['role']).__name__}")


def _require_learnable(place: str, labels: Sequence[int], remedy: str) -> None:
    if all(label == IGNORED for label in labels[1:]):
        raise ValueError(f"{place}: nothing to learn, every label behind the first token is {IGNORED}; {remedy}")
