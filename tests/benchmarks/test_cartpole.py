"""The CartPole benchmark measures each seed, and says by its exit status whether all of them balance the pole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import programs

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cartpole.py"


@pytest.mark.slow
def test_the_cartpole_benchmark_measures_each_seed():
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    done = programs.run(BENCHMARK, "--seeds", 3, 4, "--rollouts", 1)
    results = json.loads(done.stdout.splitlines()[-1])
    assert (results["seeds"], results["bound"]) == ([3, 4], 475.0)
    assert all(0 < each < 475 for each in results["return"]), "of a policy that has hardly learnt"
    assert all(each > 0 for each in results["cpu, s"])
    assert done.returncode == 1
