"""One command of the debugger's prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["Command", "whole_number"]


@dataclass(frozen=True)
class Command:
    """A command of the prompt."""

    usage: str
    help: str
    run: Callable[[str], Iterable[str]]  # called with the rest of the line; returns the lines to print
    words: Callable[[list[str]], Iterable[str]] = lambda before: ()  # completions, given the words before


def whole_number(command: str, text: str) -> int:
    """The number in the text after a command.

    Raises:
        ConfigurationError: it is not a whole number of at most 18 digits.
    """
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise ConfigurationError(f"{command} {text[:40]}: needs a whole number")
    return int(text)
