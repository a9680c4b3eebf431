"""examples/mixed_precision_accumulation.py, run as a user runs it: by its path, from another folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mixed_precision_accumulation.py"
LINE = re.compile(r"(.+?) +(\d+) batches, (\d+) updates, (\d+) left out, loss ([\d.]+), accuracy ([\d.]+)")


def test_the_four_runs_train_alike_and_fp16_says_what_it_left_out(tmp_path: Path):
    process = subprocess.run(
        [sys.executable, EXAMPLE],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    found = [match for match in map(LINE.fullmatch, lines) if match]
    whole, parts, bf16, fp16 = found
    assert [int(run[2]) for run in found] == [120, 480, 240, 60 + 60 * 7]
    assert {run[3] for run in found} == {"120"}
    assert float(parts[5]) == pytest.approx(float(whole[5]), abs=0.002)  # the same updates, up to rounding
    assert float(bf16[5]) == pytest.approx(float(whole[5]), abs=0.01)
    assert [int(run[4]) > 0 for run in found] == [False, False, False, True]
    announced = sum(int(count) for count in re.findall(r"by iteration \d+: (\d+) updates left out", process.stdout))
    assert announced == int(fp16[4])
    assert all(float(run[6]) > 0.9 for run in found)
    assert not list(tmp_path.iterdir())
