"""The resume benchmark measures every figure that has a bound, and says by its exit status whether all hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import programs

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "resume.py"


@pytest.mark.slow
def test_the_resume_benchmark_measures_every_figure_that_has_a_bound():
    small = ["--samples", "20000", "--position", "10000"]
    done = programs.run(BENCHMARK, *small, timeout=300)
    results = json.loads(done.stdout.splitlines()[-1])
    assert set(results["bounds"].values()) == {1.0}
    assert all(isinstance(results[name], float) for name in results["bounds"])
    assert done.returncode == int(any(results[name] > bound for name, bound in results["bounds"].items()))
