"""The page of a sweep: which figures it has, and that nothing in it is loaded or taken for HTML."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="pip install 'pulsetrain[sweep]'")
pytest.importorskip("plotly", reason="pip install 'pulsetrain[sweep]'")

import optuna
import yaml

from pulsetrain.sweep.pictures import write_pictures
from pulsetrain.sweep.spec import Spec, read_spec, write_saved
from pulsetrain.sweep.study import open_study

CONFIG = {"model": "torch.nn.Linear", "data": "data.loaders", "strategy": "supervised", "training": {"max_epochs": 1}}


def spec_of(folder: Path, metric: object, monkeypatch: pytest.MonkeyPatch, name: str = "found") -> Spec:
    monkeypatch.chdir(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    space = {"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}, "training.optimizer": ["sgd", "adamw"]}
    sampler = "nsga2" if isinstance(metric, list) else "random"
    given = {"config": "config.yaml", "folder": name, "space": space, "metric": metric, "trials": 8, "sampler": sampler}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(given))
    spec = read_spec(folder / "sweep.yaml")
    (folder / name).mkdir()
    write_saved(spec)
    return spec


def add_trials(spec: Spec, count: int) -> None:
    study = open_study(spec)
    distributions = {
        "training.learning_rate": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
        "training.optimizer": optuna.distributions.CategoricalDistribution(("sgd", "adamw")),
    }
    for number in range(count):
        params = {
            "training.learning_rate": 10.0 ** (-1 - number % 4),
            "training.optimizer": ("sgd", "adamw")[number % 2],
        }
        values = [1.0 / (1 + number), float(number)][: len(spec.metric)]
        study.add_trial(optuna.trial.create_trial(values=values, params=params, distributions=distributions))
    failed = optuna.trial.create_trial(
        state=optuna.trial.TrialState.FAIL, user_attrs={"error": "<script>alert(1)</script>"}
    )
    study.add_trial(failed)


def titles(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def test_one_metric_over_two_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = spec_of(tmp_path, "val/loss", monkeypatch)
    add_trials(spec, 8)
    page = write_pictures(spec).read_text()
    assert '<meta name="viewport"' in page  # a telephone would show it too small
    assert titles(page) == [
        "History of val/loss", "val/loss over training.learning_rate", "val/loss over training.optimizer",
        "Settings and val/loss", "Importance of the settings for val/loss", "Trials",
    ]  # fmt: skip
    assert "best: trial 7, val/loss 0.125" in page
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", page)
    assert "Content-Security-Policy" in page
    # no button that sends a figure to plotly's servers
    assert page.count('"modeBarButtonsToRemove": ["select2d", "lasso2d", "sendChartToCloud"]') == 5


def test_the_axis_of_a_logarithmic_range_is_logarithmic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = spec_of(tmp_path, "val/loss", monkeypatch)
    add_trials(spec, 8)
    page = write_pictures(spec).read_text()
    (axis,) = re.findall(r'{"label":"training.learning_rate",.*?}', page)
    assert re.search(r'"ticktext":\["0.0001","0.00056","0.0032","0.018","0.1"\]', axis), axis


def test_two_metrics_have_a_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = spec_of(tmp_path, ["val/loss", "val/accuracy"], monkeypatch)
    add_trials(spec, 5)
    assert titles(write_pictures(spec).read_text())[-2:] == ["Pareto front", "Trials"]


def test_without_a_completed_trial_the_table_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = spec_of(tmp_path, "val/loss", monkeypatch)
    add_trials(spec, 0)
    page = write_pictures(spec).read_text()
    assert titles(page) == ["History of val/loss", "Trials"]
    assert "no trial has completed" in page
