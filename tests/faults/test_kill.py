"""A run killed at any moment, even inside a save, and resumed each time ends like a run that was never killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def kills(count: int, seed: int) -> dict[str, object]:
    """In a process of its own, since it forks."""
    command = [sys.executable, "-m", "tests.faults.kills", "--kills", str(count), "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout) | {"stderr": done.stderr}


@pytest.mark.skipif(sys.platform != "linux", reason="forks its victims and kills their process groups")
def test_ten_kills_change_nothing_in_the_result():
    tally = kills(10, seed=1)
    assert tally["differences"] == [], tally["stderr"]
    assert tally["kills"] == 10
    assert 0 < tally["inside_saves"] < 10
