"""Functions and methods of Python's standard library, each as a prompt (signature) and a reply (body)."""

import ast
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.byte_lm.data import standard_library

END = 0  # the byte after a body; it does not occur in source code
INDENT = "    "
Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Function:
    """The text of one function.

    Args:
        file: name of the file.
        signature: from "def" (or "async def") to the end of the line with the colon, without indentation.
        body: the lines after it, indented by one level, without the docstring.
    """

    file: str
    signature: str
    body: str

    @property
    def size(self) -> int:
        """The number of bytes of signature, body and END."""
        return len((self.signature + self.body).encode()) + 1


def functions_of_library(context: int, folder: Path | None = None) -> tuple[list[Function], list[Function]]:
    """List the functions of the demo's training files and of its validation files that fit the context.

    They are in the order of the files and lines. Of equal functions only the first is kept, so that no held-out
    function is also a training function.

    Args:
        context: the maximum number of bytes of signature, body and END.
        folder: where to look; None is the standard library of the running Python.

    Raises:
        ValueError: there are no training functions, or no validation functions.
    """
    seen: set[tuple[str, str]] = set()
    sides: list[list[Function]] = []
    for files in standard_library(folder):
        found: list[Function] = []
        for path in files:
            with tokenize.open(path) as file:  # with the encoding that the file declares
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


def prompts_of_library(context: int, longest: int) -> tuple[list[str], list[str]]:
    """List the signatures of at most so many bytes in the training files, and those only in the validation files."""
    sides = ((each.signature for each in side) for side in functions_of_library(context))
    training, held_out = (dict.fromkeys(each for each in side if len(each.encode()) <= longest) for side in sides)
    return list(training), [each for each in held_out if each not in training]


def functions_in(source: str, file: str = "", *, longest: int | None = None) -> list[Function]:
    """List the functions and methods of a module in the order of their lines.

    Nested functions are left out, and so are functions with only a docstring, functions whose body is on the line of
    the signature, and those whose meaning depends on the indentation, such as functions with multi-line strings.

    Args:
        file: the module's file name.
        longest: the maximum size; None means no maximum.
    """
    lines = source.split("\n")  # as ast counts them; splitlines would also split at form feeds
    found: list[Function] = []
    for node in _definitions(ast.parse(source)):
        read = _read(node, lines, file)
        # the size first: checking it is cheap, and comparing syntax trees takes most of the time
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
    begin = first - 1  # lines before the body; comments above its first statement belong to the body
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
    """Whether the source is a definition with these statements."""
    try:
        (definition,) = ast.parse(function.signature + function.body).body
    except SyntaxError:
        return False
    found = definition.body if isinstance(definition, Definition) else []
    return list(map(ast.dump, found)) == list(map(ast.dump, statements))


def _first_line(statement: ast.stmt) -> int:
    """The first line of a node; for a decorated definition, that of its first decorator."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _moved_left(lines: list[str], columns: int) -> str:
    """Remove this much indentation; unlike textwrap.dedent, comments may have less."""
    return "\n".join(line[min(columns, len(line) - len(line.lstrip())) :] for line in lines)
