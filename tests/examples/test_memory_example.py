"""examples/memory.py: the estimate, the allocator's count and the resident memory of a row agree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.programs_examples import EXAMPLES, run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def test_estimate_and_measurements_agree(tmp_path: Path) -> None:
    header, row = run(tmp_path, EXAMPLES / "memory.py", "convolutions sgd").output
    assert header.split() == ["MB", "estimated", "allocator", "resident"]
    estimated, allocated, resident = map(float, row.split()[2:])
    assert allocated > 100
    assert estimated == pytest.approx(allocated, rel=0.1)
    assert resident == pytest.approx(estimated, rel=0.1)
