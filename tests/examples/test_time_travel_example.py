"""examples/time_travel.py finds the batch, proves that it is the cause, and verifies the run without it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pulsetrain.engine.recording import EventLog
from tests.support.programs_examples import EXAMPLES, run

EXAMPLE = EXAMPLES / "time_travel.py"
CODE = f"""
import sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
from time_travel import main
found = main()
assert found["proven"] and found["mended"], found
assert found["bad"] == 34
assert "forked from" in str(found["difference"])
"""


@pytest.mark.slow
def test_the_example_runs_to_its_end(tmp_path: Path):
    run(tmp_path, "-c", CODE)
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    losses = [
        event.output["loss"]
        for event in EventLog(tmp_path / "runs" / "b").read(engine="trainer", event="iteration_completed")
    ]
    assert len(losses) == 32
    assert all(math.isfinite(loss) for loss in losses)
    assert len(EXAMPLE.read_text().splitlines()) < 80
