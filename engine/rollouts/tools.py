"""An environment that runs the tools which a policy calls in the turns of its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pulsetrain.engine.argument_checks import check_type, check_whole_number
from pulsetrain.engine.data.chat import ChatTemplate
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["ToolEnvironment", "parse_tool_calls"]

Call = Mapping[str, Any]
"""A call of a tool: "name", and "arguments", a mapping of keywords."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def parse_tool_calls(text: str) -> list[Call]:
    """The calls in a turn, in the form of Hermes and Qwen: JSON between `<tool_call>` and `</tool_call>`.

    >>> parse_tool_calls('Let me add. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
    [{'name': 'add', 'arguments': {'a': 1, 'b': 2}}]
    >>> parse_tool_calls("It is 3.")
    []

    Raises:
        ValueError: a call is not such JSON.
    """
    calls: list[Call] = []
    for found in _CALL.findall(text):
        try:
            call = json.loads(found)  # JSONDecodeError is a ValueError
        except RecursionError:
            raise ValueError("a tool call is nested too deeply") from None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError(f"a tool call needs a 'name' and 'arguments', not {found}")
        if not isinstance(call.setdefault("arguments", {}), dict):
            raise ValueError(f"the arguments of {call['name']} need to be an object, not {call['arguments']!r}")
        calls.append(call)
    return calls


class ToolEnvironment:
    """A `TextEnvironment`: runs the tools that a turn calls, and shows their results by the tokenizer's chat template.

    A turn without a call ends the conversation, as does one that was cut before its end token. A call that cannot be
    parsed, a tool that does not exist and one that raises are answered with a text that begins with "error:", so that
    the policy can learn from it. The reward of each turn is 0: give `ConversationRollouts` a `reward`. Prompts that
    describe the tools are made by `ChatTemplate(tokenizer, tools)(messages, add_generation_prompt=True)`.

    >>> class Tokenizer:  # of bytes; it writes a turn as role:content;
    ...     chat_template, eos_token_id = "its own", ord(";")
    ...     def decode(self, tokens):
    ...         return bytes(tokens).decode()
    ...     def apply_chat_template(self, messages, add_generation_prompt=False, **options):
    ...         turns = [f"{each['role']}:{each['content']};" for each in messages]
    ...         return list("".join(turns + ["assistant:"] * add_generation_prompt).encode())
    >>> def clock():
    ...     return "noon"
    >>> environment = ToolEnvironment(Tokenizer(), [clock])
    >>> observation, reward, done = environment.step(list(b'<tool_call>{"name": "clock"}</tool_call>;'))
    >>> bytes(observation), done
    (b'tool:noon;assistant:', False)

    Args:
        tokenizer: of transformers, with a chat template.
        tools: functions; a call names one by its `__name__`, and its result is shown as `str` writes it.
        end_token: ends a turn; by default the tokenizer's `eos_token_id`.
        parse: finds the calls in the text of a turn; raises ValueError if one is malformed.

    Raises:
        ConfigurationError: there is no tool, two have the same name, the tokenizer has no chat template, or no token
            ends a turn.
        TypeError: a tool is not a function.
    """

    end_token: Any | int | None

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Callable[..., object]],
        *,
        end_token: int | None = None,
        parse: Callable[[str], Sequence[Call]] = parse_tool_calls,
    ) -> None:
        place = "ToolEnvironment"
        for each in tools:
            check_type(place, "tools", each, Callable, "functions")
        self._tools = {getattr(each, "__name__", type(each).__name__): each for each in tools}
        if not tools or len(self._tools) < len(tools):
            raise ConfigurationError("needs functions with different names", place, tools=list(self._tools))
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError("has no chat template; set its chat_template", place, tokenizer=type(tokenizer))
        self.end_token = getattr(tokenizer, "eos_token_id", None) if end_token is None else end_token
        check_whole_number(place, "end_token", self.end_token, at_least=0)
        self._tokenizer, self._parse, self._chat = tokenizer, parse, ChatTemplate(tokenizer)

    def reset(self, prompt: list[int]) -> list[int]:
        """Nothing is shown before the first turn."""
        return []

    def step(self, completion: list[int]) -> tuple[list[int], float, bool]:
        """Runs the calls of a turn; returns their results as the chat template writes them, 0, and whether it ends."""
        if completion[-1] != self.end_token:
            return [], 0.0, True
        try:
            calls = list(self._parse(self._tokenizer.decode(completion)))
        except ValueError as error:
            return self._shown([{"name": "", "arguments": {}}], [f"error: {error}"]), 0.0, False
        if not calls:
            return [], 0.0, True
        return self._shown(calls, [self._run(call) for call in calls]), 0.0, False

    def _run(self, call: Call) -> str:
        tool = self._tools.get(call["name"])
        if tool is None:
            return f"error: there is no tool {call['name']}; there are {', '.join(self._tools)}"
        try:
            return str(tool(**call["arguments"]))
        except Exception as error:  # the policy chose the arguments
            return f"error: {type(error).__name__}: {error}"

    def _shown(self, calls: Sequence[Call], results: Sequence[str]) -> list[int]:
        """What stands between the end token of a turn and the start of the policy's next turn.

        It is taken from a conversation with calls of the same names, since the template need not write the policy's own
        turn with the tokens that the policy chose.
        """
        numbered = [(f"call{number:05}", call) for number, call in enumerate(calls)]
        called = [
            {"type": "function", "id": name, "function": {"name": _encodable(call["name"]), "arguments": {}}}
            for name, call in numbered
        ]
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": called},
        ]
        before = self._chat(turns)
        turns += [
            {"role": "tool", "name": _encodable(call["name"]), "tool_call_id": name, "content": _encodable(result)}
            for (name, call), result in zip(numbered, results, strict=True)
        ]
        after = self._chat(turns, add_generation_prompt=True)
        if after[: len(before)] != before or self.end_token not in before:
            rule = (
                "the chat template changes a turn when results follow, or does not end it with this token; write an "
                "environment of your own"
            )
            raise ConfigurationError(rule, "ToolEnvironment", end_token=self.end_token)
        ends = len(before) - before[::-1].index(self.end_token)  # after the last end token
        return after[ends:]


def _encodable(text: str) -> str:
    r"""The text with "?" for lone surrogates, which JSON can write (`"\ud800"`) and tokenizers reject."""
    return text.encode(errors="replace").decode()
