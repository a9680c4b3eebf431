"""Points of curves: all of them, a part, and on disk."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.report.record import RunRecord
from pulsetrain.serve.series import RunSeries, StoredSeries, drawn
from tests.support.run_folders import BEGUN, write_run

VALUES = st.lists(st.floats(-1e9, 1e9) | st.just(math.nan), min_size=1, max_size=300)


@given(VALUES, st.integers(4, 60))
def test_drawn_points_are_the_curves_own_and_have_its_extremes(values: list[float], limit: int):
    x, y = np.arange(len(values)), np.array(values)
    at, shown = drawn(x, y, None, None, limit)
    assert len(at) <= limit + 4
    assert (np.diff(at) > 0).all()
    assert np.array_equal(y[at], shown, equal_nan=True)
    if not np.isnan(y).all():
        assert not np.isnan(shown).all()
        assert (np.nanmin(shown), np.nanmax(shown)) == (np.nanmin(y), np.nanmax(y))


@given(VALUES, st.integers(0, 300), st.integers(0, 300))
def test_a_part_has_one_point_more_at_each_side(values: list[float], low: int, high: int):
    low, high = min(low, high), max(low, high)
    x, y = np.arange(len(values)), np.array(values)
    at, _ = drawn(x, y, low, high, 1000)
    inside = [n for n in range(len(values)) if low <= n <= high]
    assert set(inside) <= set(at.tolist())
    assert len(at) <= len(inside) + 2


def test_points_are_those_of_the_report(tmp_path: Path):
    folder = write_run(tmp_path / "a", [1.0, 0.5, 0.25])
    series, record = RunSeries(folder), RunRecord(EventLog(folder))
    about = series.described()
    assert about.names == list(record.curves)
    for name, curve in record.curves.items():
        points = series.points(name)
        assert points is not None
        at, values = curve.points()
        assert (list(points[0]), list(points[2])) == (list(at), list(values))
    assert series.points("no such curve") is None
    assert about.validated == ["val/loss", "val/accuracy", "val/other"]
    assert series.happened().marks["validations"][0][:2] == (5, "validated: val/loss 1, val/accuracy 0, val/other 0.5")


def test_events_of_the_user_are_kept(tmp_path: Path):
    writer = LogWriter(tmp_path / "a" / "events")
    for seq, (event, payload) in enumerate([("started", None), ("reward_measured", {"mean": 0.5})]):
        writer.add(LoggedEvent(seq, "trainer", event, 1, seq, payload=payload, seq=seq, t=BEGUN + seq))
    writer.close()
    stored = StoredSeries.write(tmp_path / "kept", RunSeries(tmp_path / "a"), "sign")
    assert stored.happened().custom == {"reward_measured": [(1, "reward_measured: mean 0.5", "")]}


def test_anomalies_of_other_ranks_are_among_the_marks(tmp_path: Path):
    folder = write_run(tmp_path / "a", [1.0], "exception_raised", reason="peer lost")
    for rank, payload in ((1, {"kind": "loss_spike", "value": 7.5}), (2, {"kind": "nan", "value": "NaN"})):
        writer = LogWriter(folder / "events", rank)
        for seq, (event, iteration) in enumerate([("started", 0), ("anomaly_detected", 2 * rank)]):
            writer.add(LoggedEvent(
                seq, "trainer", event, 1, iteration, payload=payload if seq else None, seq=seq, t=BEGUN + seq
            ))  # fmt: skip
        writer.close()
    (folder / "events" / "events.rank3.jsonl.zst").write_bytes(b"damaged")
    stored = StoredSeries.write(tmp_path / "kept", RunSeries(folder), "sign")
    assert stored.happened().marks["anomalies"] == [
        (2, "rank 1: loss_spike: 7.5", ""), (4, "rank 2: nan: NaN", ""), (5, "exception: ValueError: peer lost", ""),
    ]  # fmt: skip
    assert next(text for _, text, _ in stored.happened().marks["start and end"]) == "started"


def test_stored_points_are_the_same_and_known_by_their_sign(tmp_path: Path):
    series = RunSeries(write_run(tmp_path / "a", [1.0, 0.5]))
    kept = tmp_path / "kept" / "a"
    assert StoredSeries.open(kept, "sign") is None
    StoredSeries.write(kept, series, "sign")
    stored = StoredSeries.open(kept, "sign")
    assert stored is not None
    assert stored.about == series.described("sign")
    for name in stored.about.names:
        one, other = stored.points(name), series.points(name)
        assert one is not None
        assert other is not None
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert StoredSeries.open(kept, "another") is None
    StoredSeries.write(kept, series, "another")  # replaces it
    assert StoredSeries.open(kept, "another") is not None
    assert [each.name for each in kept.parent.iterdir()] == ["a"]
    assert stored.happened() == series.happened()
    (kept / "points").write_bytes(b"damaged")
    assert stored.opened().points(stored.about.names[0]) is None


def test_a_log_that_grows_is_read_on(tmp_path: Path):
    writer = LogWriter(tmp_path / "a" / "events")

    def add(iteration: int) -> None:
        output = {"loss": float(iteration)}
        writer.add(LoggedEvent(
            ord=iteration, engine="trainer", event="iteration_completed", epoch=1, iteration=iteration, output=output,
            seq=iteration, t=10**18 + iteration * 10**9,
        ))  # fmt: skip

    add(0)
    series = RunSeries(tmp_path / "a")
    for iteration in range(1, 3000):
        add(iteration)
        if iteration % 700 == 0:
            assert series.update()
            points = series.points("loss, each iteration")
            assert points is not None
            assert list(points[0]) == list(range(iteration + 1))
            assert list(points[1]) == list(points[2]) == [float(n) for n in range(iteration + 1)]
    assert series.update()
    assert not series.update()


@pytest.mark.parametrize("events", [0, 1])
def test_a_run_without_values_has_no_curves(events: int, tmp_path: Path):
    writer = LogWriter(tmp_path / "a" / "events")
    for seq in range(events):
        writer.add(LoggedEvent(ord=seq, engine="trainer", event="started", seq=seq, t=10**18))
    assert RunSeries(tmp_path / "a").described().names == []


def test_the_training_engine_is_found_where_another_one_is_the_first(tmp_path: Path):
    writer = LogWriter(tmp_path / "a" / "events")

    def add(seq: int, engine: str) -> None:
        event = LoggedEvent(seq, engine, "iteration_completed", 1, seq, output={"loss": float(seq)}, seq=seq, t=BEGUN)
        writer.add(event)

    add(0, "evaluator")
    series = RunSeries(tmp_path / "a")
    add(1, "trainer")
    add(2, "evaluator")
    assert series.update()
    points = series.points("loss, each iteration")
    assert points is not None
    assert points[2].tolist() == [1.0]
    assert not series.update()
