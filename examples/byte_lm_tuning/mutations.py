"""Function bodies with one mistake, a wrong operator or name, that are still valid Python."""

import ast
import io
import keyword
import random
import tokenize
from typing import NamedTuple

from examples.byte_lm_tuning.functions import Function

KINDS = ("name", "operator")
_PAIRS = [("==", "!="), ("<", ">"), ("<=", ">="), ("+", "-"), ("*", "//"), ("+=", "-="), ("and", "or")]
_PAIRS += [("is", "is not"), ("in", "not in")]
OPPOSITES = dict(_PAIRS) | {second: first for first, second in _PAIRS}


class Token(NamedTuple):
    """A token of a text, with its start and end in the text; "is not" and "not in" are single tokens."""

    kind: int  # from tokenize: part of an f-string may look like an operator
    text: str
    begin: int
    end: int


def mutate(function: Function, kind: str, *, longest: int | None = None, seed: int = 0) -> str | None:
    """Change one token of the body.

    Args:
        kind: "operator" replaces an operator by its opposite, "name" a name by another one that the function uses.
        longest: the maximum number of bytes of the changed function, END included; None means no maximum.
        seed: selects the change. The same seed gives a function the same change in every call.

    Returns:
        The changed body; None if no such change is possible.
    """
    whole = function.signature + function.body
    tokens = tokens_of(whole)
    code = [token for token in tokens if token.kind in (tokenize.NAME, tokenize.OP)]
    body = [token for token in code if token.begin >= len(function.signature)]
    if kind == "operator":
        changes = [(token, OPPOSITES[token.text]) for token in body if token.text in OPPOSITES]
    else:
        names = sorted({token.text for token in code if _is_name(token)})
        changes = [(token, name) for token in body if _is_name(token) for name in names if name != token.text]
    random.Random(f"{seed} {kind} {whole}").shuffle(changes)
    for token, replacement in changes:
        changed = whole[: token.begin] + replacement + whole[token.end :]
        if (longest is None or len(changed.encode()) < longest) and _is_python(changed):
            return changed[len(function.signature) :]
    return None


def tokens_of(source: str) -> list[Token]:
    """List the tokens of a source in order, without comments, line ends and indentation."""
    begins = [0]  # the start of each line
    for line in source.split("\n"):
        begins.append(begins[-1] + len(line) + 1)
    tokens: list[Token] = []
    for kind, text, (row, column), (end_row, end_column), _ in tokenize.generate_tokens(io.StringIO(source).readline):
        if kind == tokenize.COMMENT or not text.strip():
            continue
        token = Token(kind, text, begins[row - 1] + column, begins[end_row - 1] + end_column)
        if tokens and (tokens[-1].text, text) in (("is", "not"), ("not", "in")):
            token = Token(kind, f"{tokens[-1].text} {text}", tokens.pop().begin, token.end)
        tokens.append(token)
    return tokens


def _is_name(token: Token) -> bool:
    return token.text.isidentifier() and not keyword.iskeyword(token.text)


def _is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
