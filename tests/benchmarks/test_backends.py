"""The benchmark of the backends measures every figure that has a bound, and its exit status says whether all hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "backends.py"


@pytest.mark.slow
def test_the_benchmark_of_the_backends_measures_all_of_them():
    # a Python of its own: jax's threads and a warm interpreter that forks do not go together
    small = ["--rounds", "1", "--steps", "50", "--model-steps", "2", "--json"]
    command = [sys.executable, str(BENCHMARK), *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = json.loads(done.stdout.splitlines()[-1])
    times = ("bare_us", "in_place_ms", "pure_ratio", "jax_ratio")
    assert all(found[name] > 0 for name in times)
    assert {"trainer_adds_us", "ignite_adds_us"} <= found.keys()
    assert done.returncode == int(bool(found["missed"]))
