"""The recorder's benchmark measures every figure that has a bound, and says by its exit status whether all hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import programs

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "recorder.py"


@pytest.mark.slow
def test_the_recorders_benchmark_measures_every_figure_that_has_a_bound():
    small = ["--events", "2000", "--log-events", "5000", "--rounds", "1"]
    done = programs.run(BENCHMARK, *small, timeout=300)
    results = json.loads(done.stdout.splitlines()[-1])
    at_most, at_least = results["at_most"], results["at_least"]
    assert set(at_most) == {
        "recording, us per event", "recording, bytes per event", "recording, us per iteration",
        "share of a 1 ms step, %", "opening a log, ms", "opening a log without table, ms", "seek by seq, ms",
        "seek by iteration, ms", "memory while reading, MB",
    }  # fmt: skip
    assert set(at_least) == {"reading, million events/s", "SummaryWriter / recording"}
    unmeasured = {name for name in [*at_most, *at_least] if name not in results}
    assert unmeasured <= {"SummaryWriter / recording"}  # where TensorBoard is not installed
    missed = any(results[name] > bound for name, bound in at_most.items())
    missed |= any(results[name] < bound for name, bound in at_least.items() if name in results)
    assert done.returncode == int(missed)
