"""Every place holds the same numbers, run as a user runs the example: by its path, from another folder."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "several_loggers.py"


def test_all_places_hold_the_same_validations(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_TRACKING_URI": ""},
        capture_output=True,
        encoding="utf-8",
        timeout=180,
    )
    assert process.returncode == 0, process.stderr
    run = tmp_path / "runs" / "digits"
    printed = re.findall(r"validation .*val/accuracy=(\S+)", process.stdout)
    with (run / "metrics.csv").open(newline="") as file:
        table = [row["val/accuracy"] for row in csv.DictReader(file) if row["val/accuracy"]]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    exact = [line["val/accuracy"] for line in lines if line["event"] == "validation_completed"]
    assert len(exact) == 3
    assert printed == [f"{value:.4g}" for value in exact]
    assert [float(value) for value in table] == exact
    assert exact[-1] > 0.9

    said = dict(line.split(": ", 1) for line in process.stdout.splitlines()[-4:] if ": " in line)
    assert said["table"] == "runs/digits/metrics.csv"
    if importlib.util.find_spec("tensorboard"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(run / "tensorboard"))
        found.Reload()
        assert [round(event.value, 6) for event in found.Scalars("val/accuracy")] == [round(v, 6) for v in exact]
    if importlib.util.find_spec("mlflow"):
        with sqlite3.connect(run / "mlflow.db") as database:
            logged = database.execute("select value from metrics where key = 'val/accuracy' order by step").fetchall()
        database.close()
        assert [value for (value,) in logged] == exact
    else:
        assert not (run / "mlflow.db").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
