"""The benchmarks run, compare with the peer they name, and say by their exit status whether the bounds hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import programs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_overhead_benchmark_measures_both_engines_in_every_row():
    done = programs.run(BENCHMARKS / "overhead.py", "--iterations", 2000, "--rounds", 1, "--json")
    rows = json.loads(done.stdout)
    assert {name: row["bound_times_less"] for name, row in rows.items()} == {
        "no handlers": 16,
        "10 handlers": 10,
        "10 handlers, every=100": 50,
    }
    assert all(row["us"] > 0 and row["ignite_us"] > row["us"] for row in rows.values())
    missed = any(row["times_less"] < row["bound_times_less"] for row in rows.values())
    assert done.returncode == int(missed)


def test_an_unknown_benchmark_is_named_with_those_that_are_there():
    command = [sys.executable, "-m", "benchmarks", "overhaed"]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "overhead" in done.stderr
