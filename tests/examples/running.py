"""Runs an example as a user does: by its path, from another folder."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Finished(NamedTuple):
    output: list[str]
    cpu_seconds: float


def run(folder: Path, *command: object) -> Finished:
    """Run Python with these arguments in the folder, on one thread."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 0, process.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Finished(process.stdout.splitlines(), seconds)
