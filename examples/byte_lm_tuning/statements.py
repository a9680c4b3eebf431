"""The statements of a text that may be Python, as Python's own parser finds them."""

import ast
import builtins
import warnings
from collections.abc import Iterator

LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)  # statements after one of them never run


def parse(text: str) -> ast.Module | None:
    """The text as a module; None if it does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some texts parse with a warning
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # too many brackets raise the last two
            return None


def sensible_statements(tree: ast.Module) -> int:
    """Count the statements after the first that can be reached, differ from all others, and use only known names.

    Known names are parameters, assigned names and Python's builtins. For a compound statement, only the first line must
    differ from others. `return` and the like do not count: they would be the easiest first line, and a model that
    starts with one never learns that others are worth more.
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
    """Yield the statements in the node, in order, except those after a `return` or the like in their block."""
    for _, block in ast.iter_fields(node):
        for child in block if isinstance(block, list) else ():
            if isinstance(child, ast.stmt):
                yield child
            if isinstance(child, ast.AST):
                yield from reachable(child)
            if isinstance(child, LEAVING):
                break
