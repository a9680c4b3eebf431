"""Rewards for texts that should be Python, decided by Python's own parser."""

import ast
import builtins
import warnings
from collections.abc import Iterator

WANTED = 3  # statements
LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)  # statements after one of them never run


def parse(text: str) -> ast.Module | None:
    """The text as a module; None if it does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of the texts only cause warnings
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two of too many brackets
            return None


def succeeds(text: str) -> bool:
    """Whether the text parses and has as many statements as wanted."""
    tree = parse(text)
    return tree is not None and sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) >= WANTED


def reward_of(text: str) -> float:
    """Mean of two shares: of the text's lines, and of the statements wanted, that its longest beginning has.

    The beginning is of whole lines and parses; the statements are sensible ones.
    """
    lines = text.splitlines(keepends=True)
    for end in range(len(lines), 0, -1):
        tree = parse("".join(lines[:end]))
        if tree is not None:
            return (end / len(lines) + min(sensible_statements(tree) / WANTED, 1.0)) / 2
    return 0.0


def sensible_statements(tree: ast.Module) -> int:
    """Count those behind the first that can be reached, repeat no other, and use known names alone.

    Known are parameters, what is assigned to, and what Python has built in. Of a statement that holds others, its first
    line is what must not repeat one. `return` and the like count for nothing: they would be the easiest first line, and
    a model that begins with one never finds out that others are worth more.
    """
    nodes = list(ast.walk(tree))
    known = {*dir(builtins), *(node.arg for node in nodes if isinstance(node, ast.arg))}
    known |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    sensible = set()
    for statement in list(reachable(tree))[1:]:
        is_known = all(node.id in known for node in ast.walk(statement) if isinstance(node, ast.Name))
        if is_known and not isinstance(statement, LEAVING):
            sensible.add(ast.unparse(statement).partition("\n")[0])
    return len(sensible)


def reachable(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements in the node, in order, but those behind a `return` or the like in their block."""
    for _, block in ast.iter_fields(node):
        for child in block if isinstance(block, list) else ():
            if isinstance(child, ast.stmt):
                yield child
            if isinstance(child, ast.AST):
                yield from reachable(child)
            if isinstance(child, LEAVING):
                break
