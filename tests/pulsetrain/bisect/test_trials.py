"""The commands of short runs: the settings that they pass on, and where these runs write."""

from __future__ import annotations

import datetime
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pulsetrain.bisect.changes import changes_between
from pulsetrain.bisect.commits import train_commit
from pulsetrain.bisect.trials import HANDLER, Pair, Trials
from pulsetrain.configuration.parse import read_config
from pulsetrain.configuration.yaml_text import dump_yaml

PARTS: dict[str, Any] = {"model": "toy.net", "data": "toy.data"}
FOLDERS: dict[str, Any] = {
    **PARTS,
    "training": {"max_epochs": 2, "run_dir": "s3://bucket/run"},
    "handlers": ["EventRecorder", {"class_path": "Checkpointer", "init_args": {"folder": "s3://bucket/run"}}],
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    for words in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a", "--allow-empty"]):
        folder.mkdir(exist_ok=True)
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: dict[str, Any], bad: dict[str, Any], commit: Path | None
) -> dict[str, Any]:
    """The configuration of the short run: with the changes, or of a commit."""
    found: dict[str, Any] = {}

    def run(trials: Trials, folder: Path, words: list[str], **options: object) -> str:
        texts = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        found.update(read_config(Path(words[1]), texts))
        return ""

    monkeypatch.setattr(Trials, "run", run)
    base = tmp_path / "good" if commit is None else commit
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "config.yaml").write_text(dump_yaml(PARTS | good))
    (tmp_path / "good" / "run.json").write_text(json.dumps({"format": 1, "base": str(base)}))
    changes = tuple(changes_between(good, bad, {}, {}))
    pair = Pair(tmp_path / "good", tmp_path / "bad", changes, "val/loss", "min", 0, 8, (PARTS | good, PARTS | bad))
    with Trials(pair, tmp_path / "into", 8) as trials:
        if commit is None:
            trials._train(trials.into / "bad", changes)
        else:
            train_commit(trials, commit, "HEAD", trials.into / "good")
    return found


@pytest.mark.parametrize("of_commits", [False, True])
def test_a_short_run_writes_into_its_own_run_folder(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_commits: bool
) -> None:
    """Elsewhere it would resume from the checkpoints of the good run, and write over them."""
    bad = {**FOLDERS, "training": {"max_epochs": 2, "run_dir": "s3://bucket/bad"}}
    config = trained(tmp_path, monkeypatch, FOLDERS, bad, repository if of_commits else None)
    assert config["training"].get("run_dir") is None
    assert config["handlers"] == [
        "EventRecorder",
        {"class_path": "Checkpointer", "init_args": {}},
        {"class_path": HANDLER, "init_args": {"iteration": 8}},
    ]


@pytest.mark.parametrize("of_commits", [False, True])
def test_the_settings_of_the_good_run_are_passed_on_as_they_are(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_commits: bool
) -> None:
    values: dict[str, Any] = {
        "commit": "1234e56", "face": "😀", "limits": [math.inf, -math.inf, 1e-5], "rates": {0: 0.1, "1": "1e-5"},
        "since": datetime.date(2026, 1, 1),
    }  # fmt: skip
    other = {"class_path": "toy.Other", "init_args": values}
    good = {"data": {"class_path": "toy.data", "init_args": values}, "handlers": [other]}
    bad = {"data": {"class_path": "toy.data", "init_args": {**values, "size": 2}}, "handlers": [other]}
    config = trained(tmp_path, monkeypatch, good, bad, repository if of_commits else None)
    assert config["handlers"][0] == other
    assert config["data"] == (good if of_commits else bad)["data"]
