"""Sweeps on the page: the trials of those whose runs are listed, read without changing anything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

pytest.importorskip("optuna", reason="pip install 'pulsetrain[sweep]'")

from pulsetrain.runs.index import RunIndex
from pulsetrain.runs.listing import path_of
from pulsetrain.serve.sweeps import sweeps_of
from pulsetrain.sweep.study import open_study
from tests.pulsetrain.sweep.test_sweep_pictures import add_trials, spec_of
from tests.support.run_folders import write_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    spec = spec_of(tmp_path, "val/loss", monkeypatch, "runs")
    add_trials(spec, 3)
    for number in (0, 2):
        write_run(tmp_path / "runs" / "trials" / f"{number:04}", [1.0])
    return tmp_path / "runs"


def found_below(root: Path) -> list[dict[str, object]]:
    index = RunIndex(root)
    runs = {path_of(run.folder, root): run for run in index.summaries()}
    return sweeps_of(map(Path, index.sweeps), runs, root)


def test_the_trials_are_listed_with_their_runs_the_best_first(folder: Path, monkeypatch: pytest.MonkeyPatch):
    before = (folder / "sweep.sqlite").read_bytes()
    monkeypatch.chdir("/")  # the folder in sweep.yaml is relative to where the sweep was started
    (found,) = found_below(folder.parent)
    assert (found["id"], found["metrics"], found["best"]) == ("runs", ["val/loss"], 2)
    trials = found["trials"]
    assert isinstance(trials, list)
    assert [each["number"] for each in trials] == [2, 1, 0, 3]
    assert [each["run"] for each in trials] == ["runs/trials/0002", None, "runs/trials/0000", None]
    assert trials[0]["params"] == {"training.learning_rate": 1e-3, "training.optimizer": "sgd"}
    assert (trials[3]["state"], trials[3]["error"]) == ("failed", "<script>alert(1)</script>")
    assert (folder / "sweep.sqlite").read_bytes() == before
    assert not list(folder.glob("sweep.sqlite-*"))


def test_a_trial_whose_process_was_killed_or_stopped_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    study = open_study(spec_of(tmp_path, "val/loss", monkeypatch, "runs"))
    trials = tmp_path / "runs" / "trials"
    for _ in range(3):
        study.ask()
    write_run(trials / "0000", [1.0], None, closed=False)
    write_run(trials / "0001", [1.0], "terminate", reason="SIGTERM")
    (found,) = found_below(tmp_path)
    states = {each["number"]: each["state"] for each in found["trials"]}  # type: ignore[attr-defined]
    assert states == {0: "interrupted", 1: "interrupted", 2: "running"}


def test_the_folder_may_be_the_sweep_itself(folder: Path):
    (found,) = found_below(folder)
    assert (found["id"], found["best"]) == ("runs", 2)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "sweep.sqlite").unlink(), "has no sweep.sqlite"),
        (lambda folder: (folder / "sweep.sqlite").write_text("damaged"), "cannot be read or written"),
        (lambda folder: (folder / "sweep.yaml").write_text("a: [1"), "sweep.yaml"),
        (lambda folder: (folder / "sweep.yaml").write_text("a: 1"), "was not written by"),
    ],
)
def test_a_sweep_that_cannot_be_read_says_why(harm, message: str, folder: Path):
    harm(folder)
    (found,) = found_below(folder)
    assert message in str(found["error"])
    assert not (folder / "sweep.sqlite-journal").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampler": "newer"}, "sampler='newer' is not one of grid, random, tpe, cmaes, nsga2, population"),
        ({"pruner": "newer"}, "pruner='newer' is not one of none, median, asha, hyperband"),
        ({"mode": ["best"]}, "mode='best' is not one of min, max"),
        ({"metric": [], "mode": []}, "it has no metric"),
    ],
)
def test_a_sweep_of_a_newer_version_does_not_hide_the_others(changed: dict[str, object], message: str, folder: Path):
    shutil.copytree(folder, folder.parent / "newer")
    saved = yaml.safe_load((folder / "sweep.yaml").read_text())
    (folder.parent / "newer" / "sweep.yaml").write_text(yaml.safe_dump({**saved, **changed}))
    newer, before = found_below(folder.parent)
    assert (newer["id"], before["best"]) == ("newer", 2)
    assert message in str(newer["error"])
    assert "use the version that has written it" in str(newer["error"])


def test_a_folder_of_trials_without_a_sweep_is_none(tmp_path: Path):
    write_run(tmp_path / "trials" / "0000", [1.0])
    assert found_below(tmp_path) == []
