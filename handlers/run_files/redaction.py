"""Keeps credentials out of the files that describe a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TypeVar

__all__ = ["REDACTED", "TOKEN", "redacted", "redacted_settings"]

REDACTED = "[redacted]"  # in place of a credential
TOKEN = (  # a regular expression for the tokens of known services, which begin at the start of a word
    r"(?:hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
)

T = TypeVar("T")

# How random a value has to look to be a credential, by the last word of its name: the number of changes between small
# letters, capitals and digits in it. "S3cr3tV4lue" has 7, "layer4block2" 3, "float32" 1, "cls" none.
_CHANGES = {
    **dict.fromkeys((
        "password", "passwd", "passphrase", "passcode", "pwd", "secret", "credential", "authorization", "bearer", "jwt",
        "webhook", "dsn", "cookie",
    ), 0),
    "pass": 1, "pw": 1, "auth": 2, "token": 3, "pat": 3, "key": 5, "signature": 5, "sig": 5, "session": 5, "sas": 5,
}  # fmt: skip
_NEVER = sys.maxsize
_OF_OTHER_WORDS = 5  # "pool_token", "low_pass"; a number in the table counts for the word alone
# before one of these words, as in "api_key", they make any value a credential
_SERVICES = frozenset({
    "api", "access", "secret", "private", "signing", "encryption", "auth", "account", "storage", "ssh", "license",
    "licence", "master", "refresh", "bearer", "oauth", "security", "shared", "sas", "basic", "http", "proxy", "smtp",
    "ftp", "db", "database", "mysql", "postgres", "pg", "redis", "mongo", "admin", "root", "hf", "huggingface", "hub",
    "wandb", "openai", "anthropic", "github", "gitlab", "slack", "discord", "telegram", "aws", "amz", "azure", "gcp",
    "google", "goog", "s3", "neptune", "comet", "mlflow", "kaggle",
})  # fmt: skip
_RUN_TOGETHER = ("password", "passwd", "passphrase", "pwd", "secret")  # "PGPASSWORD"
# left out at the end of a name
_AFTER = frozenset({"id", "url", "uri", "value", "string", "text", "header", "json"})  # "webhook_url"
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # without digits: "token2"

_CHANGE = re.compile(r"(?<=[a-z])[A-Z0-9]|(?<=[0-9])[A-Za-z]|(?<=[A-Z])[0-9]")
_RUN = re.compile(r"[\w+/=~-]{6,}")
_LONGEST = 1_000  # characters of a value are looked at

_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_ASSIGNMENT = re.compile(r"(-{0,2}[\w.-]+)=(?!=)(.+)", re.DOTALL)
_NAME = re.compile(
    r"""(?<![\w.-])(?:(--[\w.-]+)[ \t]+|([\w.-]+)\\?["']?[ \t]*(?::=|=>|=(?!=)|:(?!//))[ \t]*)"""  # followed by a value
)
_VALUE = re.compile(r"""
    \\(["']).*?\\\1                                             # in a text in quotes
    | [\w.(]*(?: "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' )        # b'x7', SecretStr('x7')
    | \[[^\[\]]*\] | \{[^{}]*\} | [\[{].*
    | [^\s,&;\#"'{}\[\]]+
""", re.VERBOSE | re.DOTALL)  # fmt: skip
_HEADER_VALUE = re.compile(r"""[^"'()\r\n]+""")  # "Authorization: Bearer x7", "Cookie: a=x7; b=x7"
_HEADERS = ("authorization", "cookie")

# (a part that is a credential by its form, what replaces it)
_FORMS = tuple((re.compile(form), REDACTED.join(around)) for form, around in (
    (r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", ("", "")),
    (r"""(://)[^\s/@:?#\["'<>]*:(?!\d+(?:[/?#\s]|$))[^\s"'<>]*@""", (r"\1", "@")),  # user:password@, to the last @
    (r"""(https?://)[^\s/@?#"'<>]+@""", (r"\1", "@")),  # in other schemes, a name alone is a user's or a container's
    (
        r"""(?i)(//hooks\.\w+\.com/|/webhooks?/|\.webhook\.office\.com/|//api\.telegram\.org/bot)[^\s"'<>?]+""",
        (r"\1", ""),
    ),
    (r"""(?<![\w.:/@-])(?!(?i:mailto|e?mail):)([\w.-]+:)[^\s@:/"']+@(?!sha\d)(?=[A-Za-z])""", (r"\1", "@")),
    (r"\b(Bearer )(?=\S*\d)[\w.~+/=-]{8,}", (r"\1", "")),
    (rf"\b{TOKEN}", ("", "")),
))  # fmt: skip


def redacted(value: T, name: str = "") -> T:
    """The value without the credentials in it: those whose name or form says so, and those inside of texts and URLs.

    >>> redacted({"api_key": "x7", "pool_token": "cls", "remote": "https://me:x7@host/a", "max_tokens": 50})
    {'api_key': '[redacted]', 'pool_token': 'cls', 'remote': 'https://[redacted]@host/a', 'max_tokens': 50}
    >>> redacted(["train", "--data.init_args.api_key=x7", "--password", "x7"])
    ['train', '--data.init_args.api_key=[redacted]', '--password', '[redacted]']

    Args:
        value: plain values: text, numbers, mappings, lists. What follows an option in a list of words is its value.
        name: of the value.
    """
    return _redacted(value, _changes_needed(name))  # type: ignore[return-value]  # of the same type


def redacted_settings(value: object, name: str = "") -> Iterator[str]:
    """The dotted names of the values that were redacted, as far as they are known.

    >>> list(redacted_settings(redacted({"data": {"init_args": {"api_key": "x7"}}})))
    ['data.init_args.api_key']
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            dotted = f"{name}.{key}" if name else str(key)
            if REDACTED in str(key):
                yield dotted
            yield from redacted_settings(item, dotted)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from redacted_settings(item, f"{name}.{index}")
    elif isinstance(value, str) and REDACTED in value:
        yield name


def _redacted(value: object, needed: int) -> object:
    """The value without credentials; what is in a mapping or a list also counts as named like it.

    Args:
        value: plain.
        needed: how many changes make a text a credential, by the value's name; see _CHANGES.
    """
    if isinstance(value, Mapping):
        return {
            _without_forms(key) if isinstance(key, str) else key: _redacted(item, _needed_in(key, needed))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        options = ["", *value[:-1]] if value else []
        items = [
            _redacted(item, _needed_after(before, item, needed)) for before, item in zip(options, value, strict=True)
        ]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        return _redacted_text(value, needed)
    is_number = isinstance(value, int | float | bytes) and not isinstance(value, bool)
    return REDACTED if is_number and needed == 0 else value


def _needed_in(key: object, needed: int) -> int:
    return _NEVER if key == "class_path" else min(needed, _changes_needed(str(key)))


def _needed_after(before: object, item: object, needed: int) -> int:
    """How many changes make an item of a list a credential: what comes before may be an option, its name."""
    is_option = isinstance(item, str) and item.startswith("--") and _OPTION.fullmatch(item)
    if is_option or not isinstance(before, str) or not _OPTION.fullmatch(before):
        return needed
    return min(needed, _changes_needed_after(before))


def _redacted_text(text: str, needed: int) -> str:
    if not text or _is_secret(text, needed):
        return REDACTED if text else text
    if (assignment := _ASSIGNMENT.fullmatch(text)) and _is_secret(assignment[2], _changes_needed_after(assignment[1])):
        return f"{assignment[1]}={REDACTED}"
    return _without_forms(_without_assignments(text))


def _without_assignments(text: str) -> str:
    """The text, the credentials among the values of its `name=value`, `name: value` and `--name value` redacted."""
    parts, end = list[str](), 0
    for found in _NAME.finditer(text):
        name = found[1] or found[2]
        needed = _changes_needed_after(name)
        if found.start() < end or needed == _NEVER:
            continue
        if text[found.start() - 1 : found.start()] in ("?", "&"):  # in a URL
            needed = 0
        forms = (_VALUE, _HEADER_VALUE) if name.lower().endswith(_HEADERS) else (_VALUE,)
        values = [value for form in forms if (value := form.match(text, found.end()))]
        value = max(values, key=re.Match.end, default=None)
        if value is None or not _is_secret(value[0], needed):
            continue
        quote = value[0][0] if value[0][0] in "\"'" else ""
        parts += [text[end : found.end()], quote, REDACTED, quote]
        end = value.end()
    return "".join([*parts, text[end:]])


def _without_forms(text: str) -> str:
    for form, replacement in _FORMS:
        text = form.sub(replacement, text)
    return text


def _is_secret(text: str, needed: int) -> bool:
    if needed in (0, _NEVER):
        return needed == 0
    return any(len(_CHANGE.findall(run)) >= needed for run in _RUN.findall(text[:_LONGEST]))


def _changes_needed_after(name: str) -> int:
    """The same for what follows an option of a program, or the name of a variable of the environment."""
    is_option = name.startswith("-") or name.isupper()
    return 0 if is_option and name.lstrip("-").lower() in ("token", "auth") else _changes_needed(name)


@lru_cache(4096)  # the same names come with each event
def _changes_needed(name: str) -> int:
    """How many changes make a value with this name a credential.

    Of a dotted name the last part counts, and the one before it if that is a service.
    """
    owner, _, last = name.rpartition(".")
    words = [word.lower() for word in _WORDS.findall(last)]
    while len(words) > 1 and words[-1] in _AFTER:
        del words[-1]
    if not words:
        return _NEVER
    service = owner.rpartition(".")[2].lower()
    word, others = words[-1], words[:-1] or [service] * (service in _SERVICES)
    word = word if word in _CHANGES else word.removesuffix("s")
    if word.endswith(_RUN_TOGETHER):
        return 0
    joined = next((each for each in _CHANGES if word.endswith(each) and word.removesuffix(each) in _SERVICES), None)
    if joined:  # "apikey"
        return 0
    if word not in _CHANGES:
        return _NEVER
    if not others or _CHANGES[word] == 0:
        return _CHANGES[word]
    return 0 if others[-1] in _SERVICES else _OF_OTHER_WORDS
