"""examples/time_travel.py finds the batch, proves that it is to blame, and proves the run without it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from engine.recording import EventLog

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "time_travel.py"
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
def test_the_story_ends_well(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    losses = [
        event.output["loss"]
        for event in EventLog(tmp_path / "runs" / "b").read(engine="trainer", event="iteration_completed")
    ]
    assert len(losses) == 32
    assert all(math.isfinite(loss) for loss in losses)
    assert len(EXAMPLE.read_text().splitlines()) < 80
