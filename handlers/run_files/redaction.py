"""Keeps credentials out of the files that describe a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

__all__ = ["REDACTED", "redacted", "redacted_settings"]

REDACTED = "[redacted]"  # in place of a credential

T = TypeVar("T")

_SECRET_WORDS = frozenset({
    "password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "authorization", "apikey",
    "webhook", "dsn", "cookie",
})  # fmt: skip
_KEYS = frozenset({"api", "access", "secret", "private", "signing", "encryption", "auth", "account", "storage", "ssh"})
# of the vocabulary of a model, not of a service
_TEXT_TOKENS = frozenset({
    "pad", "eos", "bos", "mask", "unk", "sep", "cls", "special", "first", "last", "next", "start", "end", "stop", "per",
    "prompt", "image", "padding", "separator", "unknown", "begin", "additional", "extra", "reserved",
})  # fmt: skip
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")  # user:password
_INLINE = re.compile(r"""([\w.-]+)(["']?\s*(?:=|:(?!//))\s*["']?)([^\s,&;#"'{}\[\]]+)""")
_SHAPES = re.compile(
    r"\b(hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_ASSIGNMENT = re.compile(r"(-{0,2}[\w.-]+)=(.+)", re.DOTALL)


def redacted(value: T, name: str = "") -> T:
    """The value without the credentials in it: those whose name or form says so, and those inside of URLs.

    >>> redacted({"api_key": "x7", "eos_token": "<s>", "remote": "https://me:x7@host/a", "max_tokens": 50})
    {'api_key': '[redacted]', 'eos_token': '<s>', 'remote': 'https://[redacted]@host/a', 'max_tokens': 50}
    >>> redacted(["train", "--data.init_args.token=x7", "--password", "x7"])
    ['train', '--data.init_args.token=[redacted]', '--password', '[redacted]']

    Args:
        value: plain values: text, numbers, mappings, lists. What follows an option in a list of words is its value.
        name: of the value.
    """
    return _redacted(value, name)  # type: ignore[return-value]  # of the same type


def redacted_settings(value: object, name: str = "") -> Iterator[str]:
    """The dotted names of the values that were redacted, as far as they are known.

    >>> list(redacted_settings(redacted({"data": {"init_args": {"token": "x7"}}})))
    ['data.init_args.token']
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from redacted_settings(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from redacted_settings(item, f"{name}.{index}")
    elif isinstance(value, str) and REDACTED in value:
        yield name


def _redacted(value: object, name: str) -> object:
    if isinstance(value, Mapping):
        return {key: _redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        names = [name, *(each if isinstance(each, str) and _OPTION.fullmatch(each) else name for each in value)]
        items = list(map(_redacted, value, names))
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, str) or not value:
        return value
    if _is_secret(name) and not _OPTION.fullmatch(value):
        return REDACTED
    if assignment := _ASSIGNMENT.fullmatch(value):
        option, rest = assignment.groups()
        return f"{option}={_redacted(rest, option)}"
    text = _INLINE.sub(lambda found: f"{found[1]}{found[2]}{REDACTED}" if _is_secret(found[1]) else found[0], value)
    return _SHAPES.sub(REDACTED, _IN_URL.sub(REDACTED, text))


def _is_secret(name: str) -> bool:
    """Whether the last part of a dotted name is that of a credential."""
    words = [word.lower() for word in _WORDS.findall(name.rpartition(".")[2])]
    if not words or not _SECRET_WORDS.isdisjoint(words):
        return bool(words)
    before = words[-2] if len(words) > 1 else ""
    if words[-1] in ("token", "tokens"):
        return words[-1] == "token" and before not in _TEXT_TOKENS
    return words[-1] == "key" and before in _KEYS
