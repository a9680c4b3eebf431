"""The averaged weights are better than the raw ones, run as a user runs it: by its path, from another folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ema.py"


def test_ema_prints_a_smaller_loss_and_a_higher_accuracy_for_the_averaged_weights(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    form = r"(raw|averaged) weights: validation loss (\d\.\d{4}), accuracy (\d\.\d{4})"
    found = [re.fullmatch(form, line) for line in process.stdout.splitlines()[-2:]]
    results = {match[1]: (float(match[2]), float(match[3])) for match in found if match is not None}
    (raw_loss, raw_accuracy), (loss, accuracy) = results["raw"], results["averaged"]
    # of the seeds 0 to 19, the closest has 0.81 times the loss and 0.001 more accuracy
    assert loss < 0.9 * raw_loss
    assert accuracy > raw_accuracy
    assert accuracy > 0.93
    assert not list(tmp_path.iterdir()), "it should leave nothing behind"
