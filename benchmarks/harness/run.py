"""Runs benchmarks, each in its own process, and reads their reports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.plan import FOLDER
from benchmarks.harness.results import Report

__all__ = ["Outcome", "run"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a benchmark printed, and the report in it."""

    name: str
    status: int
    output: str
    errors: str
    report: Report | None  # None if it failed, or does not report rows


def run(name: str, arguments: Sequence[str]) -> Outcome:
    """Run one benchmark with these options, so that none warms up another."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # more threads than work: they wait for each other
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False, env=environment)
    return Outcome(
        name=name, status=done.returncode, output=done.stdout, errors=done.stderr, report=_report_in(done.stdout)
    )


def _report_in(output: str) -> Report | None:
    lines = output.strip().splitlines()
    try:
        return Report.from_json(lines[-1]) if lines else None
    except ValueError:
        return None
