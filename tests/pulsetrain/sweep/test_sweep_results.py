"""The results of a sweep: which trials are the best, and which metrics the runs have."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulsetrain.engine.errors import MetricNotFoundError
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.sweep.results import SweepResults, Trial
from pulsetrain.sweep.spec import Spec
from pulsetrain.sweep.trials import check_metrics


def results(*values: tuple[float, ...] | None) -> SweepResults:
    names = ("val/loss", "val/accuracy")
    trials = tuple(
        Trial(
            number,
            "failed" if found is None else "completed",
            {},
            {} if found is None else dict(zip(names, found, strict=True)),
            Path(f"trials/{number:04d}"),
            "",
        )
        for number, found in enumerate(values)
    )
    return SweepResults(Path(), trials, {"val/loss": "min", "val/accuracy": "max"})


def test_the_front_has_the_trials_that_no_other_one_beats() -> None:
    found = results((2.0, 0.9), None, (1.0, 0.5), (2.5, 0.9), (3.0, 0.95), (1.0, 0.4))
    assert [each.number for each in found.front] == [2, 0, 4]


def test_equal_trials_are_all_on_the_front() -> None:
    assert [each.number for each in results((1.0, 0.5), (1.0, 0.5)).front] == [0, 1]


def test_without_a_completed_trial_the_front_is_empty() -> None:
    assert results(None).front == []


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
