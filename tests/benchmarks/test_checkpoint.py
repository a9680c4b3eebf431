"""The checkpoint benchmark measures every figure that has a bound, and says by its exit status whether all hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"


@pytest.mark.slow
def test_the_checkpoint_benchmark_measures_every_figure_that_has_a_bound(tmp_path: Path):
    small = ["--megabytes", "8", "--rounds", "1", "--seconds", "1", "--folder", str(tmp_path)]
    command = [sys.executable, str(BENCHMARK), *small]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # its steps are so small that threads would wait for each other
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=alone)
    results = json.loads(done.stdout.splitlines()[-1])
    bounds = results["bounds"]
    assert sorted(bounds.values()) == [1.25, 3.5, 10.0, 10.0, 10.0, 110.0]
    assert all(isinstance(results[name], float) for name in bounds)
    assert results["every='auto': saves"] >= 4
    assert done.returncode == int(any(results[name] > bound for name, bound in bounds.items()))
    assert list(tmp_path.glob("tmp*")) == []
