"""Runs an example as a user does, by its path and from another folder, and counts its lines."""

from __future__ import annotations

import os
import tokenize
from pathlib import Path
from typing import NamedTuple

from tests.support import programs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Finished(NamedTuple):
    output: list[str]


def run(folder: Path, *command: object, **variables: str) -> Finished:
    """Run Python with these arguments and environment variables in the folder, on one thread."""
    done = programs.run(*command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, timeout=180)
    assert done.returncode == 0, done.stderr
    return Finished(done.stdout.splitlines())


def lines_of_code(script: Path) -> int:
    """Lines that hold more than comments and docstrings."""
    lines: set[int] = set()
    with script.open("rb") as file:
        at_statement = True
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING):
                at_statement = True
            elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER):
                if not (at_statement and token.type == tokenize.STRING):
                    lines.update(range(token.start[0], token.end[0] + 1))
                at_statement = False
    return len(lines)
