"""Every place holds the same numbers, run as a user runs the example: by its path, from another folder."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.programs_examples import EXAMPLES, run

pytestmark = pytest.mark.slow


def test_all_places_hold_the_same_validations(tmp_path: Path) -> None:
    environment = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_TRACKING_URI": ""}
    output = run(tmp_path, EXAMPLES / "several_loggers.py", **environment).output
    folder = tmp_path / "runs" / "digits"
    printed = re.findall(r"validation .*val/accuracy=(\S+)", "\n".join(output))
    with (folder / "metrics.csv").open(newline="") as file:
        table = [row["val/accuracy"] for row in csv.DictReader(file) if row["val/accuracy"]]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    exact = [line["val/accuracy"] for line in lines if line["event"] == "validation_completed"]
    assert len(exact) == 3
    assert printed == [f"{value:.4g}" for value in exact]
    assert [float(value) for value in table] == exact
    assert exact[-1] > 0.9

    said = dict(line.split(": ", 1) for line in output[-4:] if ": " in line)
    assert said["table"] == "runs/digits/metrics.csv"
    if importlib.util.find_spec("tensorboard"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(folder / "tensorboard"))
        found.Reload()
        assert [round(event.value, 6) for event in found.Scalars("val/accuracy")] == [round(v, 6) for v in exact]
    if importlib.util.find_spec("mlflow"):
        with closing(sqlite3.connect(folder / "mlflow.db")) as database:
            logged = database.execute("select value from metrics where key = 'val/accuracy' order by step").fetchall()
        database.close()
        assert [value for (value,) in logged] == exact
    else:
        assert not (folder / "mlflow.db").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
