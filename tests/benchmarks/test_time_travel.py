"""The benchmarks of verifying, stepping and reporting measure what has a bound, and say so by their exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import programs

FOLDER = Path(__file__).parents[2] / "benchmarks"


def results_of(name: str, *words: str) -> tuple[dict[str, Any], int]:
    done = programs.run(FOLDER / f"{name}.py", *words, timeout=300)
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.returncode


@pytest.mark.slow
def test_verifying_is_measured_beside_training():
    results, status = results_of("verify", "--iterations", "40", "--rounds", "1")
    assert results["bounds"] == {"verify / training, %": 3.0}
    assert results["training, s"] > 0
    assert results["verify, s"] > 0
    assert status == int(results["verify / training, %"] > 3.0)


@pytest.mark.slow
def test_steps_are_measured_in_a_log():
    results, status = results_of("stepping", "--events", "10000", "--rounds", "3", "--passes", "1")
    assert results["at_most"] == 100.0
    assert {"next", "back"} <= set(results["ms"])
    assert results["worst"] == max(
        each["worst"] for name, each in results["ms"].items() if name not in ("open", "watch")
    )
    assert status == int(results["worst"] > 100.0)


@pytest.mark.slow
def test_a_report_is_measured():
    pytest.importorskip("plotly")
    results, status = results_of("report", "--events", "5000")
    bounds = results["at_most"]
    assert {10.0, 15.0} <= set(bounds.values())
    assert status == int(any(results[name] > bound for name, bound in bounds.items()))
