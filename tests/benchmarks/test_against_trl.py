"""The benchmark beside TRL measures each kind of training by both, and its exit status says whether all bounds hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import programs

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "against_trl.py"


@pytest.mark.slow
def test_each_kind_of_training_is_measured_beside_trl():
    for package in ("trl", "transformers", "datasets"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    done = programs.run(BENCHMARK, "--rounds", 1, "--updates", 2, "--json", timeout=500)
    found = json.loads(done.stdout)
    assert list(found["rows"]) == ["SFT", "DPO", "GRPO"]
    for row in found["rows"].values():
        assert all(row[name] > 0 for name in ("cpu_ms", "trl_cpu_ms", "ratio", "wall_ratio"))
    assert done.returncode == int(bool(found["missed"]))
