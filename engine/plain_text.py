"""Texts for a terminal: of others, in which nothing moves its cursor or changes its colours, and numbers of things."""

from __future__ import annotations

__all__ = ["format_count", "plain"]


def plain(text: str, keep: str = "") -> str:
    r"""The text with escape sequences for what is not printable.

    >>> plain("a\x1b[31m [red]ä"), plain("a\nb\u202e", keep="\n")
    ('a\\x1b[31m [red]ä', 'a\nb\\u202e')

    Args:
        text: any text.
        keep: characters that stay although they are not printable.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


def format_count(number: int, thing: str) -> str:
    """A number of things.

    >>> format_count(1, "epoch"), format_count(2000, "epoch"), format_count(2, "batch")
    ('1 epoch', '2,000 epochs', '2 batches')
    """
    plural = f"{thing}es" if thing.endswith("tch") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"
