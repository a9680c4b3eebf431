"""`pulsetrain sweep`, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.cli.sweep import _noting_killed
from pulsetrain.engine.file_lock import lock
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.log.run_file import read_run_file
from pulsetrain.sweep.results import Trial, read_results
from tests.faults.sweeps import CONFIG, MODEL, ROOT, outcome, run
from tests.support.run_folders import write_run

Streams = pytest.CaptureFixture[str]
GRID = (
    "config: base.yaml\nfolder: out\nsampler: grid\nmetric: val/loss\nspace: {training.learning_rate: [1e-3, 1e-2]}\n"
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.py").write_text(MODEL)
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "s.yaml").write_text(GRID)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pulsetrain(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pulsetrain", *words], env=environment, capture_output=True, text=True, cwd=folder
    )


def losses(folder: Path) -> dict[int, float]:
    events = EventLog(folder).read(event="validation_completed")
    return {event.iteration: event.payload["metrics"]["val/loss"] for event in events}  # type: ignore[index, call-overload]


def test_a_folder_that_is_not_a_sweep_is_refused(base: Path, capsys: Streams) -> None:
    assert main(["sweep", str(base), "--status"]) == 2
    assert "is not a sweep" in capsys.readouterr().err


def test_a_folder_with_other_files_is_refused(base: Path, capsys: Streams) -> None:
    (base / "out").mkdir()
    (base / "out" / "thesis.txt").write_text("precious")
    assert main(["sweep", "s.yaml"]) == 2
    assert "holds other files and no sweep" in capsys.readouterr().err
    assert [each.name for each in (base / "out").iterdir()] == ["thesis.txt"]


def test_a_mode_against_the_name_of_the_metric_is_noted(base: Path, capsys: Streams) -> None:
    (base / "out").mkdir()
    (base / "out" / "thesis.txt").write_text("so that nothing is trained")
    (base / "s.yaml").write_text(GRID)
    assert main(["sweep", "s.yaml"]) == 2
    assert "note" not in capsys.readouterr().err
    (base / "s.yaml").write_text(GRID + "mode: max\n")
    assert main(["sweep", "s.yaml"]) == 2
    assert "mode=max for val/loss, of which smaller values are usually better" in capsys.readouterr().err


def test_a_second_sweep_on_the_same_folder_is_refused(base: Path, capsys: Streams) -> None:
    (base / "out").mkdir()
    descriptor = os.open(base / "out" / "sweep.lock", os.O_RDWR | os.O_CREAT)
    try:
        assert lock(descriptor)
        assert main(["sweep", "s.yaml"]) == 2
    finally:
        os.close(descriptor)
    assert "another process runs this sweep" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_by_several_metrics_names_the_front_and_writes_its_configurations(base: Path) -> None:
    (base / "base.yaml").write_text(f"{CONFIG}metrics: {{mae: ignite.metrics.MeanAbsoluteError}}\n")
    space = "{training.learning_rate: {low: 1e-4, high: 1e-1, log: true}}"
    (base / "s.yaml").write_text(
        f"config: base.yaml\nfolder: out\nsampler: nsga2\ntrials: 3\nmetric: [val/loss, val/mae]\nspace: {space}\n"
    )
    done = pulsetrain("sweep", "s.yaml")
    assert done.returncode == 0, done.stderr
    trials = [each for each in read_results(Path("out")).trials if each.state == "completed"]
    front = [
        each
        for each in trials
        if not any(
            other.values != each.values and all(other.values[name] <= value for name, value in each.values.items())
            for other in trials
        )
    ]
    assert f"Pareto front   trials {', '.join(str(each.number) for each in front)}\n" in done.stdout
    assert sorted(Path("out/front").iterdir()) == sorted(Path(f"out/front/{each.number:04d}.yaml") for each in front)
    assert not Path("out/best.yaml").exists()
    best = base / "out" / "front" / f"{front[0].number:04d}.yaml"
    (base / "elsewhere").mkdir()  # the model is found beside the configuration that the sweep has varied
    trained = pulsetrain("train", str(best), "--run", "again", folder=base / "elsewhere")
    assert trained.returncode == 0, trained.stderr
    assert losses(base / "elsewhere" / "again") == losses(front[0].folder)


@pytest.mark.slow
def test_a_metric_that_no_run_has_stops_the_sweep_before_the_first_trial_ends(base: Path) -> None:
    (base / "s.yaml").write_text(
        "config: base.yaml\nfolder: out\nsampler: grid\nmetric: val/regret\nmode: min\n"
        "space: {training.max_epochs: [1000000]}\n"
    )
    done = pulsetrain("sweep", "s.yaml")
    assert done.returncode == 2
    assert "val/regret" in done.stderr
    assert "val/loss" in done.stderr


@pytest.mark.slow
def test_a_sweep_prints_its_trials_and_writes_the_best_configuration(base: Path) -> None:
    (base / "s.yaml").write_text(GRID)
    done = pulsetrain("sweep", "s.yaml")
    assert done.returncode == 0, done.stderr
    results = read_results(Path("out"))
    assert [(each.number, each.state) for each in results.trials] == [(0, "completed"), (1, "completed")]
    assert results.best is not None
    assert results.best.values["val/loss"] == min(losses(results.best.folder).values())
    page = Path("out/sweep.html").read_text()
    assert "History of val/loss" in page
    assert "<script src=" not in page
    before = {each.folder: (each.folder / "run.json").read_bytes() for each in results.trials}
    again = pulsetrain("sweep", "s.yaml")  # nothing is left to do
    assert again.returncode == 0
    assert again.stdout == done.stdout
    assert {folder: (folder / "run.json").read_bytes() for folder in before} == before
    trained = pulsetrain("train", "out/best.yaml", "--run", "best")
    assert trained.returncode == 0, trained.stderr
    assert losses(Path("best")) == losses(results.best.folder)
    (base / "s.yaml").write_text(GRID + "seed: 5\n")
    refused = pulsetrain("sweep", "s.yaml")
    assert refused.returncode == 2
    assert "other values of seed" in refused.stderr


@pytest.mark.slow
def test_a_metric_that_the_runs_lack_ends_the_sweep_and_names_theirs(base: Path) -> None:
    (base / "s.yaml").write_text(GRID.replace("val/loss", "val/accuracy"))
    done = pulsetrain("sweep", "s.yaml")
    assert done.returncode == 2
    assert "val/accuracy" in done.stderr
    assert "val/loss" in done.stderr


@pytest.mark.slow
def test_a_configuration_that_changes_while_the_sweep_runs_stops_it(base: Path) -> None:
    change = "    base = __import__('pathlib').Path(__file__).parent / 'base.yaml'\n"
    change += "    base.write_text(base.read_text().replace('seed: 3', 'seed: 4'))\n"
    head = "def net(width: int = 4):\n"
    (base / "tiny.py").write_text(MODEL.replace(head, head + change))
    done = pulsetrain("sweep", "s.yaml")  # the first trial changes it
    assert done.returncode == 2
    assert "base.yaml: has changed since the sweep began" in done.stderr
    assert read_results(Path("out")).trials[0].state == "completed"


@pytest.mark.slow
def test_the_reader_of_the_output_may_leave(base: Path) -> None:
    words = [sys.executable, "-m", "pulsetrain", "sweep", "s.yaml", "--trials", "1"]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert done.returncode == 0, done.stderr
    assert "BrokenPipe" not in done.stderr
    assert Path("out/best.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "interval", "error"),
    [
        (CONFIG, 40, "the run ends after 60 iterations, and the population needs generations x interval = 80"),
        (CONFIG.replace("tiny.net", "tiny.nets"), 20, "no nets"),
    ],
)
def test_a_population_whose_members_all_fail_ends_with_their_errors(
    base: Path, config: str, interval: int, error: str
) -> None:
    (base / "base.yaml").write_text(config)
    (base / "tiny.py").write_text(MODEL + "\ndef nets(width):\n    raise ValueError('no nets')\n")
    space = "space: {training.learning_rate: {low: 1e-4, high: 1e-2, log: true}}\n"
    population = f"sampler: population\npopulation: 4\ngenerations: 2\ninterval: {interval}\nworkers: 2\n"
    (base / "s.yaml").write_text(f"config: base.yaml\nfolder: out\nmetric: val/loss\n{space}{population}")
    done = pulsetrain("sweep", "s.yaml")
    assert done.returncode == 1, done.stderr
    assert "no trial has completed" in done.stderr
    trials = read_results(Path("out")).trials
    assert [each.state for each in trials] == ["failed"] * 4
    assert all(error in each.error for each in trials)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_population_that_was_killed_ends_like_one_that_was_not(tmp_path: Path) -> None:
    done = run(trials=12, kills=4, seed=2, folder=tmp_path, sampler="population")
    assert sum(done["kills"].values()) >= 1  # the last ones may come after the end
    assert done["trials"] == 12
    assert done["differences"] == []


@pytest.mark.slow
def test_a_member_of_a_population_continues_exactly(base: Path) -> None:
    space = "space: {training.learning_rate: {low: 1e-4, high: 1e-2, log: true}}\n"
    population = "sampler: population\npopulation: 4\ngenerations: 2\ninterval: 10\n"
    (base / "s.yaml").write_text(f"config: base.yaml\nfolder: out\nmetric: val/loss\n{space}{population}")
    done = pulsetrain("sweep", "s.yaml")
    assert done.returncode == 0, done.stderr
    trials = {each.number: each for each in read_results(Path("out")).trials}
    assert len(trials) == 8
    parents = {number: Path(read_run_file(trials[number].folder)["parent"]["run"]).name for number in range(4, 8)}  # type: ignore[index, call-overload, arg-type]
    kept = [number for number in range(4, 8) if parents[number] == f"{number - 4:04d}"]
    assert len(kept) == 3  # of four, the worst is replaced
    best = read_results(Path("out")).best
    assert best is not None
    assert f"lineage        {int(parents[best.number])} -> {best.number}\n" in done.stdout
    rate = json.dumps(trials[kept[0]].params["training.learning_rate"])
    straight = pulsetrain("train", "base.yaml", "--run", "straight", f"--training.learning_rate={rate}")
    assert straight.returncode == 0, straight.stderr
    assert losses(trials[kept[0]].folder)[20] == losses(Path("straight"))[20]


@pytest.mark.slow
def test_a_sweep_that_was_killed_ends_like_one_that_was_not(tmp_path: Path) -> None:
    done = run(trials=8, kills=3, seed=1, folder=tmp_path)
    assert sum(done["kills"].values()) >= 1  # the last ones may come after the end
    assert done["trials"] == 8
    assert done["differences"] == []


@pytest.mark.slow
def test_a_pruned_sweep_that_was_killed_between_two_records_of_a_trial_ends_like_one_that_was_not(base: Path) -> None:
    (base / "base.yaml").write_text(CONFIG.replace("max_epochs: 6", "max_epochs: 2"))
    space = "{training.learning_rate: [1e-2, 1e-4, 1e-5]}"
    (base / "s.yaml").write_text(
        f"config: base.yaml\nsampler: grid\nmetric: val/loss\nspace: {space}\n"
        "pruner: {name: asha, min_resource: 1, reduction_factor: 2}\n"
    )
    whole = pulsetrain("sweep", "s.yaml", "--folder", "whole")
    assert whole.returncode == 0, whole.stderr
    assert [each.state for each in read_results(Path("whole")).trials] == ["completed", "pruned", "pruned"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "tests.faults.sweep_places", ".", "sweep", "s.yaml", "--folder", "killed"]
    statuses = [subprocess.run(words, env=environment, capture_output=True).returncode for _ in range(3)]
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert all(Path(place).exists() for place in ("decided", "ended", "stored"))
    assert outcome(Path("killed")) == outcome(Path("whole"))


@pytest.mark.slow
def test_the_example_finds_a_better_learning_rate(base: Path) -> None:
    done = pulsetrain("sweep", str(ROOT / "examples" / "sweep.yaml"), "--trials", "3", "--folder", "out")
    assert done.returncode == 0, done.stderr
    trained = pulsetrain("train", str(ROOT / "examples" / "sweep_digits.yaml"), "--run", "before")
    assert trained.returncode == 0
    events = EventLog("before").read(event="validation_completed")
    before = max(event.payload["metrics"]["val/accuracy"] for event in events)  # type: ignore[index, call-overload]
    best = read_results(Path("out")).best
    assert best is not None
    assert best.values["val/accuracy"] > before


def test_a_trial_whose_process_was_killed_or_stopped_is_interrupted(tmp_path: Path):
    folder = write_run(tmp_path / "0000", [1.0], None, closed=False)
    stopped = write_run(tmp_path / "0002", [1.0], "terminate", reason="SIGTERM")
    states = [
        _noting_killed(Trial(0, state, {}, {}, where, "")).state
        for state, where in (
            ("running", folder), ("completed", folder), ("running", tmp_path / "0001"), ("running", stopped)
        )
    ]  # fmt: skip
    assert states == ["interrupted", "completed", "running", "interrupted"]
