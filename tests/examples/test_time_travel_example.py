"""examples/time_travel.py finds the batch, proves that it is the cause, and verifies the run without it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pulsetrain.engine.recording import EventLog
from tests.support.programs_examples import EXAMPLES, run

EXAMPLE = EXAMPLES / "time_travel.py"
PAGE = EXAMPLES.parent / "docs" / "debugging.md"
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
    printed = run(tmp_path, "-c", CODE).output
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    losses = [
        event.output["loss"]
        for event in EventLog(tmp_path / "runs" / "b").read(engine="trainer", event="iteration_completed")
    ]
    assert len(losses) == 32
    assert all(math.isfinite(loss) for loss in losses)
    assert len(EXAMPLE.read_text().splitlines()) < 80
    for command, shown in shown_results(PAGE.read_text()).items():
        result = [line for line in printed[printed.index(command) + 1 :] if not line.startswith("[")]
        assert shown == result[: len(shown)], command


def shown_results(page: str) -> dict[str, list[str]]:
    """The results below the `verify` commands of a page, by the command."""
    blocks = [block.strip().splitlines() for block in page.split("```")[1::2]]
    return {lines[0]: lines[1:] for lines in blocks if lines[0].startswith("$ pulsetrain verify")}


def test_the_page_shows_the_results_of_both_verifications():
    shown = shown_results(PAGE.read_text())
    assert list(shown) == ["$ pulsetrain verify runs/a --from 33 --to 35", "$ pulsetrain verify runs/b"]
    assert [lines[-1].split(":")[0] for lines in shown.values()] == ["tensors of checkpoints"] * 2
