"""The benchmark of the language model measures each contestant, and says by its exit status whether the bounds hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "language_model.py"


@pytest.mark.slow
def test_each_contestant_is_measured_next_to_the_hand_written_loop_or_named_as_absent():
    command = [sys.executable, BENCHMARK, "--tiny", "--iterations", "60", "--rounds", "1", "--growth", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    results = json.loads(done.stdout)
    ours = {"hand-written", "hand-written, validating only", "ours", "ours, the demo's handlers"}
    assert ours <= results["rows"].keys()
    assert results["rows"].keys() | results["absent"].keys() == {*ours, "HF Trainer", "Lightning"}
    assert results["rows"]["hand-written"]["throughput"] == 1.0
    for row in results["rows"].values():
        assert row["least"] <= row["throughput"] <= row["most"]  # of a single round
        assert row["ms_per_iteration"] > 0
        assert row["peak_mib"] > 100
    assert done.returncode == int(bool(results["missed"]))
