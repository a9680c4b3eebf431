"""What is shown of a run, as text."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.watch.braille import draw
from pulsetrain.watch.sections import mark_lines, process_lines
from pulsetrain.watch.watched import curve_names, watch_runs
from tests.pulsetrain.runs.test_summary import own
from tests.support.run_folders import write_run


def test_a_process_that_the_others_wait_for_is_marked(tmp_path: Path):
    own(tmp_path, os.getpid())
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"processes": [{"host": "a"}] * 3}]}))
    now = time.time_ns()
    for rank in range(3):
        writer = LogWriter(tmp_path / "events", rank)
        for seq, event in enumerate(
            ["get_batch_started", "get_batch_completed", "iteration_started"][: 1 + 2 * (rank != 1)]
        ):
            writer.add(LoggedEvent(seq, "trainer", event, 1, 7, seq=seq, t=now - (9 - seq) * 10**9))
        if rank == 2:
            payload = {"kind": "memory_growth", "value": 5.0, "batch_indices": []}
            writer.add(LoggedEvent(-1, "trainer", "anomaly_detected", 1, 7, payload=payload, seq=9, t=now - 10**9))
    (watched,) = watch_runs([tmp_path])
    watched.update()
    lines = process_lines(watched)
    assert [line.split()[0] for line in lines[:4]] == ["rank", "0", "1", "2"]
    assert ["<- the others wait" in line for line in lines[:4]] == [False, False, True, False]
    assert lines[4] == "waiting for rank 1: loading a batch"
    assert mark_lines(watched, "anomalies", 5) == ["       7  rank 2: memory_growth: 5"]


def test_runs_of_the_same_name_are_named_by_their_paths(tmp_path: Path):
    names = [each.name for each in watch_runs([tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c"])]
    assert names == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run"), "c"]


def test_the_order_of_the_curves_does_not_depend_on_which_run_has_a_curve_first(tmp_path: Path):
    write_run(tmp_path / "whole", [1.0, 0.5])
    writer = LogWriter(tmp_path / "begun" / "events")
    writer.add(LoggedEvent(0, "trainer", "iteration_completed", 1, 1, output={"loss": 1.0}, seq=0, t=time.time_ns()))
    orders = []
    for names in (["whole", "begun"], ["begun", "whole"]):
        runs = watch_runs([tmp_path / name for name in names])
        for each in runs:
            each.update()
        orders.append(curve_names(runs))
    assert orders[0] == orders[1] == ["val/loss", "loss, each iteration", "val/accuracy", "val/other"]


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [np.nan], [1e308, -1e308], [1e-300, 1.0, np.nan, 3.0], []])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (20, 5), (200, 40)])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_any_curve_fits_any_size(values: list[float], width: int, height: int, logarithmic: bool):
    points = np.arange(len(values), dtype=float), np.array(values)
    rows = draw([points, points], width, height, logarithmic=logarithmic)
    assert len(rows) == max(height, 2 if np.isfinite(values).any() else height)
    assert all(len(row) <= max(width, 13) for row in rows)


def test_a_gap_stays_a_gap():
    at = np.arange(60, dtype=float)
    rows = draw([(at, np.where((at > 20) & (at < 40), np.nan, 1.0))], 71, 2)
    drawn = "".join(cell.character for cell in rows[0])[11:]
    assert drawn[:20].strip()
    assert not drawn[22:38].strip()
    assert drawn[42:].strip()


@pytest.mark.parametrize(("values", "text"), [([], "no values yet"), ([np.nan, np.inf], "not finite")])
def test_a_curve_that_cannot_be_drawn_says_why(values: list[float], text: str):
    rows = draw([(np.arange(len(values), dtype=float), np.array(values))], 40, 5)
    assert text in "\n".join("".join(cell.character for cell in row) for row in rows)
