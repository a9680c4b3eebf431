"""Runs an example as a user does: by its path, from another folder."""

from __future__ import annotations

import os
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
