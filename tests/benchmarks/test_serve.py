"""The benchmark of the page measures complete answers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette is not installed")

from benchmarks import serve
from benchmarks.harness.results import NOT_MEASURED, Report
from pulsetrain.runs.index import log_sign_of
from pulsetrain.serve.series import StoredSeries
from pulsetrain.serve.store import series_folder

UNREAD = {"error": "is being read"}


def answering(monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any]) -> list[str]:
    """Let the server give these answers; returns the addresses that are asked for."""
    left, asked = list(answers), list[str]()

    def urlopen(address: str) -> io.BytesIO:
        asked.append(address)
        return io.BytesIO(json.dumps(left.pop(0) if len(left) > 1 else left[0]).encode())

    monkeypatch.setattr(serve, "urlopen", urlopen)
    return asked


def test_only_answers_with_all_curves_are_measured(monkeypatch: pytest.MonkeyPatch):
    whole = {"a": {"values": 5}, "b": {"values": 5}}
    asked = answering(monkeypatch, {"a": UNREAD, "b": UNREAD}, {**whole, "b": UNREAD}, whole)
    assert serve.seconds_of_answers("http://x/", 3, 5, run=["a", "b"], patience=3) > 0
    assert asked == ["http://x/api/whatif?run=a&run=b&patience=3"] * 6  # three until all are read


@pytest.mark.parametrize("wrong", [{"error": "does not exist"}, {"values": 4}])
def test_a_wrong_answer_is_not_measured(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    answering(monkeypatch, {"a": {"values": 5}, "b": wrong})
    with pytest.raises(RuntimeError, match="b: expected 5 values, the server answers"):
        serve.seconds_of_answers("http://x/", 3, 5, run=["a", "b"])


def test_the_curves_of_all_copies_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "ITERATIONS", 50)
    serve.copy_runs(tmp_path, 3)
    for name in ("run-000", "run-001", "run-002"):
        kept = StoredSeries.open(series_folder(tmp_path, name), log_sign_of(str(tmp_path / name)))
        assert kept is not None
        assert kept.points("loss, each iteration")[0].tolist() == list(range(1, 51))


def test_without_a_browser_the_page_is_not_measured_and_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["serve", "--json", "--runs", "2", "--rounds", "1"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(serve, "ITERATIONS", 50)
    monkeypatch.setattr(serve, "seconds_of_answers", lambda *arguments, **words: 0.1)
    monkeypatch.setattr(serve, "seconds_of_frequent_spikes", lambda rounds: 0.1)
    monkeypatch.setattr(serve, "seconds_to_the_page", lambda root: 0.1)
    serve.main()
    found = Report.from_json(capsys.readouterr().out)
    assert any("chromium, chromedriver: not installed" in note for note in found.notes)
    missing = {row.name for row, verdict in found.verdicts() if verdict == NOT_MEASURED and row.measured != 0.1}
    assert missing == {"first paint, s", "zoom of all runs, s", "memory of the server, MB"}
    assert {row.measured for row in found.rows} >= {0.1}
