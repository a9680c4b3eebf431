"""Rewards for texts that should be Python: two functions of prompts and completions, for TextRollouts.

A text succeeds if it parses and has at least 3 statements, including its `def`. The form is stricter, since a model
finds any shortcut, such as writing `return` three times: only statements before a `return` count, and only if they
differ from each other and use known names. A text whose beginning parses gets part of the reward: so few of the demo's
texts succeed that hardly any group would contain one. A text without an end is scored up to its last whole line.
"""

import ast
from collections.abc import Sequence

from examples.byte_lm_tuning.functions import END
from examples.byte_lm_tuning.statements import parse, sensible_statements

WANTED = 3  # statements


def form(prompts: list[str], completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    return [reward_of(text_of(*each)) for each in zip(prompts, completions, completion_ids, strict=True)]


def success(prompts: list[str], completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    return [float(succeeds(text_of(*each))) for each in zip(prompts, completions, completion_ids, strict=True)]


def text_of(prompt: str, completion: str, tokens: Sequence[int]) -> str:
    """The text up to its end or, if it was cut off, up to the end of its last whole line."""
    text = prompt + completion
    return text if tokens[-1] == END else text[: text.rfind("\n") + 1]


def succeeds(text: str) -> bool:
    """Whether the text parses and has at least WANTED statements."""
    tree = parse(text)
    return tree is not None and sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) >= WANTED


def reward_of(text: str) -> float:
    """Mean of two fractions: of the text's lines, and of WANTED statements, that are in its longest valid beginning.

    The beginning consists of whole lines and parses; only sensible statements count.
    """
    lines = text.splitlines(keepends=True)
    for end in range(len(lines), 0, -1):
        tree = parse("".join(lines[:end]))
        if tree is not None:
            return (end / len(lines) + min(sensible_statements(tree) / WANTED, 1.0)) / 2
    return 0.0
