"""Functions and methods of Python's standard library, each as a prompt (signature) and a reply (body)."""

import ast
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.byte_lm.data import standard_library

END = 0  # the byte after a body; no source contains it
INDENT = "    "
Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Function:
    """The text of one function.

    Args:
        file: name of the file that contains it.
        signature: from "def" (or "async def") up to the end of the line with the colon, at no indentation.
        body: the lines below it at one level of indentation, without the docstring.
    """

    file: str
    signature: str
    body: str

    @property
    def size(self) -> int:
        """Bytes of both and of END."""
        return len((self.signature + self.body).encode()) + 1


def functions_of_library(context: int, folder: Path | None = None) -> tuple[list[Function], list[Function]]:
    """List the functions of the demo's training files and of its validation files that fit the context.

    They stand in the order of the files and of their lines; of equal ones only the first is kept, so that no held-out
    function is one that is trained on.

    Args:
        context: most bytes of signature, body and END.
        folder: where to look; None is the standard library of the running Python.

    Raises:
        ValueError: there are none of one side.
    """
    seen: set[tuple[str, str]] = set()
    sides: list[list[Function]] = []
    for files in standard_library(folder):
        found: list[Function] = []
        for path in files:
            with tokenize.open(path) as file:  # in the encoding that the file declares
                source = file.read()
            for function in functions_in(source, path.name, longest=context):
                if (text := (function.signature, function.body)) not in seen:
                    seen.add(text)
                    found.append(function)
        sides.append(found)
    training, held_out = sides
    if not training or not held_out:
        raise ValueError(
            f"functions_of_library(context={context}): {len(training)} functions for training and {len(held_out)} held "
            "out are as short as that, needs at least 1 of each; raise the context"
        )
    return training, held_out


def functions_in(source: str, file: str = "", *, longest: int | None = None) -> list[Function]:
    """List the functions and methods of a module in the order of their lines.

    Left out are functions inside others, those of which nothing remains without the docstring, bodies on the line of
    the signature, and those that mean something else at another indentation, as texts of several lines do.

    Args:
        file: what to call it.
        longest: leave out those of a greater size; None takes all.
    """
    lines = source.split("\n")  # as ast counts them; splitlines would also split at form feeds
    found: list[Function] = []
    for node in _definitions(ast.parse(source)):
        read = _read(node, lines, file)
        # the size first: it is known at once, and to compare syntax trees takes most of the time
        if read is not None and (longest is None or read[0].size <= longest) and _means(*read):
            found.append(read[0])
    return found


def _definitions(node: ast.AST) -> Iterator[Definition]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield child
        else:
            yield from _definitions(child)


def _read(node: Definition, lines: list[str], file: str) -> tuple[Function, list[ast.stmt]] | None:
    """Cut out a function, and its statements without the docstring."""
    first = _first_line(node.body[0])
    if lines[first - 1].encode()[: node.body[0].col_offset].strip():
        return None  # on the signature's line
    begin = first - 1  # how many lines are before the body, the comments above its first statement not counted
    while not lines[begin - 1].strip() or lines[begin - 1].lstrip().startswith("#"):
        begin -= 1
    kept = lines[begin : node.end_lineno]
    statements = node.body
    if ast.get_docstring(node, clean=False) is not None:
        docstring, *statements = node.body
        if not statements or _first_line(statements[0]) == docstring.end_lineno:
            return None
        kept = lines[begin : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
    body = textwrap.indent(_moved_left(kept, node.body[0].col_offset).strip("\n"), INDENT) + "\n"
    return Function(file, _moved_left(lines[node.lineno - 1 : begin], node.col_offset) + "\n", body), statements


def _means(function: Function, statements: list[ast.stmt]) -> bool:
    """Whether it is a definition with these statements."""
    try:
        (definition,) = ast.parse(function.signature + function.body).body
    except SyntaxError:
        return False
    found = definition.body if isinstance(definition, Definition) else []
    return list(map(ast.dump, found)) == list(map(ast.dump, statements))


def _first_line(statement: ast.stmt) -> int:
    """A decorated definition begins at its first decorator, whatever its lineno says."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _moved_left(lines: list[str], columns: int) -> str:
    """The lines without so much of their indentation; unlike textwrap.dedent, with comments that had less."""
    return "\n".join(line[min(columns, len(line) - len(line.lstrip())) :] for line in lines)
