"""The benchmark of the language model on JAX measures each trainer beside its hand-written loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import programs

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "language_model_jax.py"
ROWS = ["hand-written", "ours", "hand-written, saving", "ours, the demo's handlers"]


@pytest.mark.slow
def test_the_benchmark_of_the_model_on_jax_compares_with_a_hand_written_loop():
    done = programs.run(BENCHMARK, "--rounds", 1, "--turn", 2, "--json", timeout=500)
    found = json.loads(done.stdout)
    assert list(found["rows"]) == ROWS
    for mine, theirs in (ROWS[1::-1], ROWS[:1:-1]):
        assert "ratio" not in found["rows"][theirs]
        assert all(found["rows"][mine][name] > 0 for name in ("iteration_ms", "ratio", "cpu_ratio", "peak_mib"))
    assert done.returncode == int(bool(found["missed"]))
