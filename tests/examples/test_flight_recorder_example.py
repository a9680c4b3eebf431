"""examples/flight_recorder.py finds the row that was planted, from the log alone."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flight_recorder.py"


def test_the_example_shows_what_it_announces(tmp_path: Path):
    found = runpy.run_path(str(EXAMPLE))["main"](tmp_path)
    assert found["row"] == 77
    assert "patience" not in str(found["stops"])
    assert all("has not improved" in reason for reason in found["stops"].values())
    assert found["difference"]
    assert found["difference"].divergence.a.iteration == 10
