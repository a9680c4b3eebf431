"""Several processes that share out the trials of one sweep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.file_lock import lock
from pulsetrain.sweep.coordinator import _started
from pulsetrain.sweep.results import read_results
from pulsetrain.sweep.workers import check_name, has_left, owned_by, owner_of
from tests.support.training_jobs import processes_with, until, write_run

Streams = pytest.CaptureFixture[str]
RATES = [1e-3, 1e-2, 2e-2, 3e-2]
GRID = f"config: base.yaml\nfolder: out\nsampler: grid\nmetric: val/loss\nspace: {{training.learning_rate: {RATES}}}\n"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_run(tmp_path)
    (tmp_path / "s.yaml").write_text(GRID)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_worker_has_left_its_trials_when_its_lock_is_free(tmp_path: Path) -> None:
    own = owner_of(tmp_path, "1")
    with owned_by(tmp_path, "0"):
        assert not has_left(tmp_path, owner_of(tmp_path, "0"), own)
        assert has_left(tmp_path, owner_of(tmp_path, "2"), own)
    assert has_left(tmp_path, owner_of(tmp_path, "0"), own)
    (tmp_path / "other").mkdir()
    assert not has_left(tmp_path, owner_of(tmp_path / "other", "0"), own)
    assert not has_left(tmp_path, None, own)


def test_the_id_of_a_sweep_stays_when_its_folder_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    before = owner_of(tmp_path / "a", None)
    (tmp_path / "a").rename(tmp_path / "b")
    after = owner_of(tmp_path / "b", None)
    assert (before["id"], after["folder"]) == (after["id"], str(tmp_path / "b"))
    assert has_left(tmp_path / "b", before, after)


@pytest.mark.parametrize("name", ["", "../a", "a b", "$(x)", "a/b", "x" * 50])
def test_a_name_that_cannot_be_in_a_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="--worker"):
        check_name(name)


def test_a_sweep_for_one_process_alone_keeps_workers_out_and_they_keep_it_out(base: Path, capsys: Streams) -> None:
    (base / "out").mkdir()
    descriptor = os.open(base / "out" / "sweep.lock", os.O_RDWR | os.O_CREAT)
    try:
        assert lock(descriptor)
        assert main(["sweep", "s.yaml", "--worker", "0"]) == 2
        assert "another process runs this sweep" in capsys.readouterr().err
        os.close(descriptor)
        descriptor = os.open(base / "out" / "sweep.lock", os.O_RDWR)
        assert lock(descriptor, shared=True)
        assert main(["sweep", "s.yaml"]) == 2
        assert "another process runs this sweep" in capsys.readouterr().err
    finally:
        os.close(descriptor)


def test_a_name_is_given_once(base: Path, monkeypatch: pytest.MonkeyPatch, capsys: Streams) -> None:
    monkeypatch.setattr("pulsetrain.sweep.workers._ATTEMPTS", 1)
    monkeypatch.setattr("pulsetrain.sweep.workers._PAUSE", 0.0)
    (base / "out" / "submit").mkdir(parents=True)  # of `pulsetrain submit`
    with owned_by(base / "out", "0"):
        (base / "out" / "sweep.lock").touch()
        assert main(["sweep", "s.yaml", "--worker", "0"]) == 2
    assert "another process is the worker 0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["grid", "random"])
def test_the_trials_of_a_killed_worker_are_continued_by_the_others(base: Path, sampler: str) -> None:
    write_run(base, pause=0.01)
    if sampler == "random":
        space = "space: {training.learning_rate: {low: 1e-4, high: 1e-2}}"
        (base / "s.yaml").write_text(
            f"config: base.yaml\nfolder: out\nsampler: random\nmetric: val/loss\ntrials: 4\n{space}\n"
        )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = []
    for name in ("a", "b"):
        words = [sys.executable, "-m", "pulsetrain", "sweep", "s.yaml", "--worker", name]
        with open(f"{name}.txt", "ab") as output:
            workers.append(subprocess.Popen(words, env=environment, stdout=output, stderr=output))
    until(lambda: len(list(Path("out/trials").glob("*/checkpoints/*/manifest.json"))) > 1)
    workers[0].kill()
    workers[0].wait()
    assert workers[1].wait(timeout=120) == 0, Path("b.txt").read_text()
    trials = read_results(Path("out")).trials
    assert [(each.number, each.state) for each in trials] == [(number, "completed") for number in range(4)]
    drawn = [each.params["training.learning_rate"] for each in trials]
    assert len(set(drawn)) == 4  # no two workers have drawn the same
    assert sampler == "random" or sorted(drawn) == RATES
    assert Path("out/best.yaml").exists()
    until(lambda: not list(processes_with(str(base))))


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError])
def test_a_process_is_started_again_where_the_one_that_forks_it_was_killed(error: type[Exception]) -> None:
    class Killed:
        starts = 0

        def start(self) -> None:
            Killed.starts += 1
            if Killed.starts == 1:
                raise error

    assert isinstance(_started(Killed), Killed)  # type: ignore[arg-type]
    assert Killed.starts == 2
