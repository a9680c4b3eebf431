"""Events as tables of pandas and Arrow."""

from __future__ import annotations

import math

import pytest

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.log import tables

EVENTS = [
    LoggedEvent(0, "trainer", "epoch_started", 1, 0, seq=4, t=1_763_000_000_000_000_001),
    LoggedEvent(
        1, "trainer", "iteration_completed", 1, 1, output={"loss": "NaN", "kind": "NaN"}, lr=[0.1, 0.2], seq=5, t=2
    ),
    LoggedEvent(
        2, "trainer", "iteration_completed", 1, 2, output={"loss": 1.5, "kind": "big"}, lr=[0.1], seq=6, t=3
    ),
    LoggedEvent(3, "e", "validation_completed", 1, 2, payload={"metrics": {"val/loss": 2.0}, "at": [1, 2]}, seq=7, t=4),
]  # fmt: skip


def test_nested_values_have_columns_of_their_own():
    found = tables.columns(EVENTS)
    assert found["seq"] == [4, 5, 6, 7]
    assert found["engine"] == ["trainer", "trainer", "trainer", "e"]
    assert found["payload.metrics.val/loss"] == [None, None, None, 2.0]
    assert found["payload.at"] == [None, None, None, [1, 2]]
    assert (found["lr.0"], found["lr.1"]) == ([None, 0.1, 0.1, None], [None, 0.2, None, None])
    assert len({len(column) for column in found.values()}) == 1


def test_nan_is_a_number_among_numbers_and_text_among_text():
    found = tables.columns(EVENTS)
    assert math.isnan(found["output.loss"][1])
    assert found["output.kind"] == [None, "NaN", "big", None]


def test_two_values_under_one_name_take_one_row():
    found = tables.columns([LoggedEvent(payload={"a": {"b": 1}, "a.b": 2}), LoggedEvent(payload={"a.b": 3})])
    assert found["payload.a.b"] == [2, 3]


def test_pandas():
    pandas = pytest.importorskip("pandas")
    frame = tables.to_pandas(iter(EVENTS))
    assert list(frame["seq"]) == [4, 5, 6, 7]
    assert frame["t"][0] == pandas.Timestamp(1_763_000_000_000_000_001, unit="ns", tz="UTC")
    assert frame["output.loss"].dtype == "float64"
    assert frame["output.loss"].sum() == 1.5
    assert len(tables.to_pandas([])) == 0


def test_arrow():
    pyarrow = pytest.importorskip("pyarrow")
    mixed = LoggedEvent(payload={"metrics": {"val/loss": "much"}}, seq=8)
    table = tables.to_arrow([*EVENTS, mixed])
    assert table.column("seq").to_pylist() == [4, 5, 6, 7, 8]
    assert table.schema.field("t").type == pyarrow.timestamp("ns", tz="UTC")
    assert table.column("payload.at").to_pylist()[3] == [1, 2]
    assert table.column("payload.metrics.val/loss").to_pylist()[3:] == ["2.0", '"much"']
    assert tables.to_arrow([]).num_rows == 0


@pytest.mark.parametrize(
    ("function", "package", "extra"), [(tables.to_pandas, "pandas", "pandas"), (tables.to_arrow, "pyarrow", "arrow")]
)
def test_a_missing_package_is_named(monkeypatch, function, package, extra):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'pulsetrain\[{extra}\]'"):
        function(EVENTS)
