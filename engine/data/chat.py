"""Converts chat messages and prompts to tokens, with labels that mark the trained ones."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Container, Mapping, Sequence
from operator import index
from typing import Any, Protocol

from pulsetrain.engine.argument_checks import check_choice, check_type, is_whole
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError, shortened

__all__ = [
    "ChatTemplate",
    "Encoder",
    "Message",
    "Template",
    "Tool",
    "chatml",
    "encode_prompt",
    "tokenize_chat",
    "tokenize_prompt",
]

Template = Callable[[str, str], tuple[str, str]]
"""(role, content) -> (text that is never trained on, text that is trained on if the role is)."""

Message = Mapping[str, Any]
"""A turn: "role", "content", and what a tokenizer's chat template reads besides, such as "tool_calls"."""


class ChatTemplate:
    """The chat template of a tokenizer.

    >>> class Tokenizer:  # of bytes
    ...     def apply_chat_template(self, messages, add_generation_prompt=False, **options):
    ...         turns = [f"{each['role']}:{each['content']};" for each in messages]
    ...         return list("".join(turns + ["assistant:"] * add_generation_prompt).encode())
    >>> bytes(ChatTemplate(Tokenizer())([{"role": "user", "content": "hi"}], add_generation_prompt=True))
    b'user:hi;assistant:'

    Args:
        tokenizer: of transformers, or any object with its `apply_chat_template`.
        tools: the functions that the template describes.

    Raises:
        TypeError: a tool is neither a JSON schema nor a function.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Tool] | None = None) -> None:
        for each in tools or ():
            if not isinstance(each, Mapping) and not callable(each):
                raise ArgumentTypeError("needs JSON schemas or functions", "ChatTemplate", tools=shortened(each))
        self._tokenizer, self._options = tokenizer, {"tools": list(tools)} if tools else {}

    def __call__(self, messages: Sequence[Message], **options: bool) -> list[int]:
        """The tokens of a conversation.

        Raises:
            Exception: the exception of the template, with a note that names the messages.
            TypeError: it returned no token ids.
        """
        given = {"tokenize": True, "return_dict": False, **self._options, **options}
        try:
            result = self._tokenizer.apply_chat_template(list(messages), **given)
        except Exception as error:  # a template may reject roles, or a role at the end of a conversation
            error.add_note(f"in tokenize_chat, the chat template applied to messages[:{len(messages)}]")
            raise
        return _as_tokens("tokenize_chat", "apply_chat_template", result)


class Encoder(Protocol):
    """A tokenizer, such as one of transformers, tokenizers or tiktoken."""

    @property
    def encode(self) -> Callable[..., object]:
        """Text to tokens."""


Tool = Mapping[str, Any] | Callable[..., object]
"""A function that the model may call: its JSON schema, or a function in Python, which transformers describes."""

ASSISTANT = "assistant"


def chatml(role: str, content: str) -> tuple[str, str]:
    r"""The ChatML turn: the header is given; the content and its end mark are trained on.

    >>> chatml("user", "hello")
    ('<|im_start|>user\n', 'hello<|im_end|>\n')
    """
    return f"<|im_start|>{role}\n", f"{content}<|im_end|>\n"


def tokenize_chat(
    messages: Sequence[Message],
    tokenizer: Encoder | Callable[[str], object],
    *,
    template: Template | None = None,
    train_on: str = "assistant",
    tools: Sequence[Tool] | None = None,
) -> dict[str, list[int]]:
    """Converts a conversation to an example; labels are IGNORED for tokens that are not trained on.

    If the tokenizer has a chat template and `template` is None, the tokenizer's template is applied, and what it adds
    after the generation prompt is trained on, "tool_calls" of the assistant as well. Otherwise `template` writes each
    turn: its two texts are encoded separately, so that no token spans both, and no special tokens are added.

    >>> turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    >>> example = tokenize_chat(turns, str.encode, template=lambda role, content: (role[0] + ":", content))
    >>> bytes(example["input_ids"])
    b'u:hia:yo'
    >>> example["labels"]
    [-100, -100, -100, -100, -100, -100, 121, 111]

    Args:
        messages: turns, each with "role" and "content".
        tokenizer: a tokenizer of transformers or tokenizers, any object with an `encode`, or a function from text to
            tokens.
        template: writes a turn; the default is `chatml` if the tokenizer has no chat template.
        train_on: "assistant" trains on each assistant turn, "last" on the last one, "all" on the turns of every role.
            With "all", a tokenizer's own template has its headers trained on too.
        tools: the functions that the chat template describes to the model; only with the tokenizer's own template.

    Returns:
        "input_ids" and "labels", of equal length; see `pulsetrain.engine.data.sequences`.

    Raises:
        ConfigurationError: `train_on` is unknown, there are `tools` without a chat template, or the chat template
            rewrites a turn when other turns follow; the message names the turn.
        TypeError: a message, a text or a tokenizer's result has the wrong type.
        ValueError: no token would be trained on.
    """
    check_choice("tokenize_chat", "train_on", train_on, ("assistant", "last", "all"))
    _check_messages(messages)
    trained = [number for number, each in enumerate(messages) if train_on == "all" or each["role"] == ASSISTANT]
    if train_on == "last":
        trained = trained[-1:]
    if not trained:
        roles = ", ".join(sorted({repr(message["role"]) for message in messages}))
        raise ConfigurationError(
            f"nothing to learn, no turn has the role {ASSISTANT!r}, only {roles}; rename the role, pass "
            "train_on='all', or leave the conversation out",
            "tokenize_chat",
            train_on=train_on,
        )
    check_type("tokenize_chat", "tools", tools, Sequence | None, "a list of JSON schemas or functions")
    if template is None and getattr(tokenizer, "chat_template", None) and hasattr(tokenizer, "apply_chat_template"):
        chat = ChatTemplate(tokenizer, tools)
        if train_on == "all":
            tokens = chat(messages)
            labels = list(tokens)
        else:
            tokens, labels = _by_prefixes(messages, chat, trained)
    elif tools:
        rule = "only the chat template of a tokenizer describes them; use such a tokenizer, and leave template= out"
        raise ConfigurationError(rule, "tokenize_chat", tools=shortened(tools))
    else:
        tokens, labels = _by_segments(messages, tokenizer, template or chatml, trained)
    _require_learnable("tokenize_chat(messages)", labels, "give a trained turn some content")
    return {"input_ids": tokens, "labels": labels}


def tokenize_prompt(
    prompt: str, completion: str, tokenizer: Encoder | Callable[[str], object], *, end: int | None = None
) -> dict[str, list[int]]:
    """Converts a prompt and a completion to an example; only the completion is trained on.

    The two are encoded separately, so that no token spans both. No token but `end` is added.

    >>> tokenize_prompt("ab", "c", str.encode, end=0)
    {'input_ids': [97, 98, 99, 0], 'labels': [-100, -100, 99, 0]}

    Args:
        tokenizer: see `tokenize_chat`.
        end: the token id that ends the completion; it is trained on too.

    Returns:
        "input_ids" and "labels", of equal length; see `pulsetrain.engine.data.sequences`.

    Raises:
        ConfigurationError: `end` is not a token id.
        TypeError: a text or a tokenizer's result has the wrong type.
        ValueError: no token would be trained on.
    """
    if end is not None and (not is_whole(end) or end < 0):
        raise ConfigurationError("needs a token id, 0 or more", "tokenize_prompt", end=end)
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


def encode_prompt(prompt: str | Sequence[Message], tokenizer: Encoder | Callable[[str], object]) -> list[int]:
    r"""Converts a prompt to tokens that a completion follows: a text, or messages and the header of the answer.

    Messages are written by the tokenizer's chat template, else by `chatml`. A text is encoded alone, without special
    tokens, as `tokenize_prompt` does.

    >>> bytes(encode_prompt("1+1=", str.encode))
    b'1+1='
    >>> bytes(encode_prompt([{"role": "user", "content": "hi"}], str.encode))
    b'<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'

    Args:
        tokenizer: see `tokenize_chat`.

    Raises:
        ConfigurationError: the last message is the assistant's, so that nothing is left to answer.
        TypeError: a message, a text or a tokenizer's result has the wrong type.
    """
    place = "encode_prompt"
    if isinstance(prompt, str):
        return _encoder(place, tokenizer)(prompt)
    _check_messages(prompt)
    if prompt[-1]["role"] == ASSISTANT:
        raise ConfigurationError(
            f"{place}(prompt): the last message is the {ASSISTANT}'s; leave it out, or let another one follow"
        )
    if getattr(tokenizer, "chat_template", None) and hasattr(tokenizer, "apply_chat_template"):
        return ChatTemplate(tokenizer)(prompt, add_generation_prompt=True)
    tokens, _ = _by_segments(prompt, tokenizer, chatml, ())
    return tokens + _encoder(place, tokenizer)(chatml(ASSISTANT, "")[0])


def _by_segments(
    messages: Sequence[Message],
    tokenizer: Encoder | Callable[[str], object],
    template: Template,
    trained: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Tokens and labels of the turns that a template writes; each segment is encoded separately."""
    encode = _encoder("tokenize_chat", tokenizer)
    tokens: list[int] = []
    labels: list[int] = []
    for number, message in enumerate(messages):
        if not isinstance(message.get("content"), str) or message.get("tool_calls"):
            what = (
                "'tool_calls'" if message.get("tool_calls") else f"a content of {type(message.get('content')).__name__}"
            )
            raise TypeError(
                f"tokenize_chat(messages[{number}]): a template needs a turn of text, and this one has {what}; "
                "write it as text, or use a tokenizer with a chat template"
            )
        texts = template(message["role"], message["content"])
        if not isinstance(texts, tuple) or [type(text) for text in texts] != [str, str]:
            raise TypeError(
                f"tokenize_chat(template): for messages[{number}] it returned {texts!r}; return two texts, the given "
                "and the trained one"
            )
        given, learnt = map(encode, texts)
        tokens += given + learnt
        labels += [IGNORED] * len(given) + (learnt if number in trained else [IGNORED] * len(learnt))
    return tokens, labels


def _by_prefixes(
    messages: Sequence[Message], chat: ChatTemplate, trained: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Tokens and labels from the tokenizer's chat template; a turn is what it adds to the turns before."""
    remedy = "pass template=, such as pulsetrain.engine.data.chat.chatml" + (
        ", or train_on='last'" if len(trained) > 1 else ""
    )
    tokens: list[int] = []
    labels: list[int] = []
    for number in trained:
        given = chat(messages[:number], add_generation_prompt=True) if number else _before_first(messages, chat)
        _require_prefix(tokens, given, number - 1, remedy)
        labels += [IGNORED] * (len(given) - len(tokens))
        tokens = chat(messages[: number + 1])
        _require_prefix(given, tokens, number, remedy)
        labels += tokens[len(given) :]
    if trained[-1] + 1 < len(messages):
        given, tokens = tokens, chat(messages)
        _require_prefix(given, tokens, len(messages) - 1, remedy)
        labels += [IGNORED] * (len(tokens) - len(given))
    return tokens, labels


def _before_first(messages: Sequence[Message], chat: ChatTemplate) -> list[int]:
    """What the template writes before a conversation that begins with the assistant, up to the generation prompt."""
    asked = [next((each for each in messages if each["role"] == "user"), {"role": "user", "content": "?"})]
    prompt = chat(asked, add_generation_prompt=True)[len(chat(asked)) :]
    tokens = chat(messages[:1])
    for start in range(len(tokens) - len(prompt) + 1):
        if prompt and tokens[start : start + len(prompt)] == prompt:
            return tokens[: start + len(prompt)]
    raise ConfigurationError(
        f"tokenize_chat(messages[0]): the conversation begins with {ASSISTANT!r}, and the tokenizer's chat template "
        "writes no generation prompt before it; put a message before it, or pass template="
    )


def _require_prefix(shorter: list[int], longer: list[int], number: int, remedy: str) -> None:
    """Rejects a template that changes what it wrote before: the trained tokens could not be identified."""
    if longer[: len(shorter)] == shorter:
        return
    pairs = zip(shorter, longer, strict=False)
    first = next((at for at, (old, new) in enumerate(pairs) if old != new), min(len(shorter), len(longer)))
    raise ConfigurationError(
        f"tokenize_chat(messages[{number}]): this turn changes what the tokenizer's chat template wrote before it, "
        f"from token {first} on ({shorter[first : first + 4]} became {longer[first : first + 4]}), so the trained "
        f"tokens cannot be identified; {remedy}"
    )


# ------------------------------------------------------------------------------------------------ tokenizers


def _encoder(place: str, tokenizer: object) -> Callable[[str], list[int]]:
    """The tokenizer as a function from text to tokens that adds no special tokens."""
    encode: Any = getattr(tokenizer, "encode", tokenizer)
    needs = "an object with an encode, or a function from text to a list of tokens"
    check_type(place, "tokenizer", encode, Callable, needs)
    try:
        parameters: Container[str] = inspect.signature(encode).parameters
    except (TypeError, ValueError):  # a function that is not written in Python
        parameters = ()
    options: dict[str, object] = {}
    if "add_special_tokens" in parameters:  # transformers, tokenizers
        options["add_special_tokens"] = False
    elif "allowed_special" in parameters:  # tiktoken, which otherwise rejects text that contains a template's marks
        options["allowed_special"] = "all"
    return lambda text: _as_tokens(place, "tokenizer", encode(text, **options))


def _as_tokens(place: str, name: str, result: object) -> list[int]:
    """The token ids in a tokenizer's result: a list, an array, bytes, or an object that holds one of these."""
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
    raise TypeError(f"{place}({name}): returned {reprlib.repr(result)}; needs a list of integers, the token ids")


# ---------------------------------------------------------------------------------------------------- checks


def _check_messages(messages: object) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(
            f"tokenize_chat(messages): needs a list of messages, each with 'role' and 'content', not "
            f"{type(messages).__name__}"
        )
    if not messages:
        raise ConfigurationError(
            "needs 1 message or more; leave the conversation out", "tokenize_chat", messages=messages
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & set(message):
            given = ", ".join(map(repr, message)) if isinstance(message, Mapping) else type(message).__name__
            raise TypeError(f"tokenize_chat(messages[{number}]): needs 'role' and 'content', not {given or 'no field'}")
        if not isinstance(message["role"], str):
            raise TypeError(
                f"tokenize_chat(messages[{number}]): needs text as 'role', not {type(message['role']).__name__}"
            )


def _require_learnable(place: str, labels: Sequence[int], remedy: str) -> None:
    if all(label == IGNORED for label in labels[1:]):
        raise ValueError(f"{place}: nothing to learn, every label after the first token is {IGNORED}; {remedy}")
