"""`pulsetrain fork` of a run of two processes: who makes it, who speaks, and that it continues the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.checkpoint import find_checkpoints
from pulsetrain.engine.recording.log.run_file import read_run_file
from tests.support.programs_command_line import by_two, main_and_said
from tests.support.runs_of_ranks import in_one_process

TRAIN = [
    "train",
    "config.yaml",
    "--run=runs/a",
    "--handlers=[EventRecorder, CSVLogger, {class_path: Checkpointer, init_args: {every: {iterations: 2}}}]",
]
FORK = ["fork", "runs/a", "--at=6", "--into=runs/b"]


@pytest.mark.parametrize("parallel", [[], pytest.param(["--parallel.shard=2"], marks=pytest.mark.slow)], ids=str)
def test_a_fork_of_two_processes_continues_the_run(parallel: list[str], folder: Path, capsys: Any):
    assert [status for status, _ in by_two([*TRAIN, *parallel])] == [0, 0]
    before = sorted(Path("runs/a").rglob("*"))
    (status, said), other = by_two(FORK)
    assert (status, other) == (0, (0, ""))
    lines = said.splitlines()
    assert lines[:2] == ["run folder  runs/b", "starts      after iteration 6 of runs/a"]
    assert lines[-1] == ("train it: pulsetrain train runs/b/config.yaml --run runs/b --resume latest --launch.nproc=2")
    assert [each.name for each in find_checkpoints(Path("runs/b/checkpoints"))] == ["000000006-fork"]
    assert read_run_file(Path("runs/b"))["parent"]["iteration"] == 6
    assert [status for status, _ in by_two(["fork", *FORK[1:-1], "--into=runs/c", "--train"])] == [0, 0]
    capsys.readouterr()
    assert main(["diff", "runs/a", "runs/c"]) == 0
    assert "runs/a and runs/c agree" in capsys.readouterr().out
    assert main(["diff", "runs/c", "--ranks"]) == 0
    assert sorted(Path("runs/a").rglob("*")) == before


def test_a_fork_is_made_in_the_number_of_processes_that_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    assert [status for status, _ in by_two(TRAIN)] == [0, 0]
    started: list[Any] = []

    def launch(*given: Any) -> int:
        started.append(given)
        Path("runs/b").mkdir()
        shutil.copy("runs/a/config.yaml", "runs/b")
        return 0

    monkeypatch.setattr("pulsetrain.cli.fork.launch_once", launch)
    for words, said in (
        ([], "runs/a: was trained by 2 processes after iteration 6; fork it in as many, --launch.nproc 2"),
        (["--launch.nproc=none"], "needs a number of processes"),
        (["--launch.nproc=2", "--skip-batches=x"], "--skip-batches x: needs an iteration"),
        (["--launch.nproc=2", "--training.seed=4"], "--set training.seed: cannot be changed in a fork"),
        (["--launch.nproc=2", "--into=runs/a"], "--into runs/a: already holds a run"),
    ):
        assert main([*FORK, *words]) == 2, words
        assert said in capsys.readouterr().err
    assert not started
    words = ["--launch.nproc=2", "--set", "training.learning_rate=0.001", "--skip-batches=7-8"]
    assert main([*FORK, *words]) == 0
    expected = ["fork", "runs/a", "--at", "6", "--into", "runs/b", "--training.learning_rate=0.001"]
    assert started == [(2, [*expected, "--skip-batches", "7-8"])]
    assert capsys.readouterr().out == (
        "train it: pulsetrain train runs/b/config.yaml --run runs/b --resume latest "
        "--launch.nproc=2 --launch.min_nproc=2\n"
    )


def test_one_process_forks_a_run_of_two_with_virtual_ranks(folder: Path):
    assert [status for status, _ in by_two([*TRAIN, "--parallel={virtual: 2, reduction: tree}"])] == [0, 0]
    status, said = in_one_process(lambda rank: main_and_said([*FORK, "--train"]), forked=True).value
    assert status == 0, said
    status, said = in_one_process(lambda rank: main_and_said(["diff", "runs/a", "runs/b"]), forked=True).value
    assert status == 0, said


@pytest.mark.slow
def test_the_remedy_for_a_sharded_run_makes_a_fork_in_one_process(folder: Path, capsys: Any):
    options = ["--parallel.pipeline=2", "--parallel.schedule=gpipe", "--model=plain.layers"]
    (folder / "plain.py").write_text(
        "from torch import nn\n"
        "def layers(): return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1), nn.Tanh())\n"
    )
    assert [status for status, _ in by_two([*TRAIN, *options])] == [0, 0]
    assert main(FORK) == 2
    said = capsys.readouterr().err
    assert "fork it in as many, --launch.nproc 2, or in another number of them" in said
    remedy = said.split("in one by ")[1].split()
    assert remedy == ["--set", "parallel=null", "--launch.nproc", "1"]
    status, said = in_one_process(lambda rank: main_and_said([*FORK, *remedy, "--train"]), forked=True).value
    assert status == 0, said
    assert read_run_file(Path("runs/b"))["parallel"] == {}
