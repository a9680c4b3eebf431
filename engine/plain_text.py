"""Texts of others in a terminal: nothing in them can move its cursor, change its colours, or turn what follows."""

from __future__ import annotations

__all__ = ["plain"]


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
