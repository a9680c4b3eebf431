"""Which metrics the trials of a sweep report while they train."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulsetrain.engine.errors import MetricNotFoundError
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.sweep.spec import Spec
from pulsetrain.sweep.trials import check_metrics


def recorded(folder: Path, *rounds: dict[str, float]) -> Spec:
    writer = LogWriter(folder / "events")
    for number, metrics in enumerate(rounds):
        writer.add(
            LoggedEvent(
                number, "trainer", "validation_completed", 1, number, seq=number, t=number, payload={"metrics": metrics}
            )
        )
    writer.end()
    writer.close()
    return Spec("config.yaml", "out", {}, ("val/loss", "rollout/return"), ("min", "max"))


def test_nothing_is_known_of_a_run_that_has_not_begun(tmp_path: Path) -> None:
    spec = recorded(tmp_path / "a")
    assert not check_metrics(spec, tmp_path / "none")
    assert not check_metrics(spec, tmp_path / "a")


def test_a_metric_of_a_set_that_reports_later_is_waited_for(tmp_path: Path) -> None:
    spec = recorded(tmp_path, {"val/loss": 1.0}, {"val/loss": 0.9}, {"val/loss": 0.8})
    assert not check_metrics(spec, tmp_path)


def test_all_metrics_are_there(tmp_path: Path) -> None:
    spec = recorded(tmp_path, {"val/loss": 1.0}, {"rollout/return": 3.0})
    assert check_metrics(spec, tmp_path)


def test_a_metric_that_is_missing_twice_is_reported_with_those_that_there_are(tmp_path: Path) -> None:
    spec = recorded(tmp_path, {"val/accuracy": 0.5})
    assert not check_metrics(spec, tmp_path)
    spec = recorded(tmp_path / "twice", {"val/accuracy": 0.5}, {"val/accuracy": 0.6})
    with pytest.raises(MetricNotFoundError, match=r"val/loss.*there are: val/accuracy"):
        check_metrics(spec, tmp_path / "twice")
