"""`pulsetrain verify` of a run of two processes: who starts them, who speaks, and with which status it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pulsetrain.cli import main
from tests.support.programs_command_line import by_two, main_and_said
from tests.support.runs_of_ranks import in_one_process

TRAIN = [
    "train",
    "config.yaml",
    "--run=runs/a",
    "--handlers=[EventRecorder, CSVLogger, {class_path: Checkpointer, init_args: {every: {iterations: 5}}}]",
]
VERIFY = ["verify", "runs/a"]


@pytest.fixture
def run(folder: Path) -> Path:
    assert [status for status, _ in by_two(TRAIN)] == [0, 0]
    return folder / "runs" / "a"


def test_the_main_process_alone_speaks_for_all(run: Path):
    before = sorted(run.rglob("*"))
    (status, said), other = by_two(VERIFY)
    assert (status, other) == (0, (0, ""))
    assert "runs/a, iterations 1 to 10: reproduced, " in said
    assert " events of 2 processes agree bit for bit" in said
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("learning_rate: 0.01", "learning_rate: 0.02"))
    (status, said), other = by_two(VERIFY)
    assert (status, other) == (1, (0, ""))
    assert said.count("not reproduced") == 2, "a line for each rank"
    (run / "events" / "events.rank1.jsonl.zst").unlink()
    (run / "events" / "tail.rank1.jsonl").unlink()
    (status, said), other = by_two(VERIFY)
    assert (status, other) == (3, (0, ""))
    assert "not proven" in said
    assert "has no log of rank 1" in said
    assert sorted(run.rglob("*")) == [path for path in before if "rank1." not in path.name]


def test_nothing_is_started_in_another_number_of_processes(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    started: list[Any] = []
    monkeypatch.setattr("pulsetrain.cli.verify.launch_once", lambda *given: started.append(given) or 0)
    for words, said in (
        ([], "trained by 2 processes, and 1 process would repeat it"),
        (["--launch.nproc=3"], "trained by 2 processes, and 3 processes would repeat it"),
        (["--launch.nproc=2", "--launch.min_nproc=1"], "--launch.min_nproc: a run is repeated by as many processes"),
        (["--launch.nproc=2", "--from=3"], "has no checkpoint before iteration 3"),
        (["--training.seed=1"], "--training.seed: verify has no such option"),
    ):
        assert main([*VERIFY, *words]) == 2, words
        assert said in capsys.readouterr().err
    assert main(["where", "runs/a", "--launch.nproc=2"]) == 2
    assert not started
    assert main([*VERIFY, "--launch.nproc=2", "--to=7"]) == 0
    assert started == [(2, ["verify", "runs/a", "--to", "7"], 1)], "as many threads as each process had"


def test_one_process_repeats_a_run_of_two_with_virtual_ranks(folder: Path):
    topology = "--parallel={virtual: 2, reduction: tree}"
    assert [status for status, _ in by_two([*TRAIN, topology])] == [0, 0]
    status, said = in_one_process(lambda rank: main_and_said(VERIFY), forked=True).value
    assert status == 0, said
    assert "runs/a, iterations 1 to 10: reproduced, " in said
    assert "trained by 2 processes, and repeated by 1" in said
    assert main([*VERIFY, "--launch.nproc=3"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [True, False], ids=["torchrun", "launch"])
def test_two_processes_are_started(torchrun: bool, run: Path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    program = ["-m", "torch.distributed.run", "--nproc_per_node=2", "-m"] if torchrun else ["-m"]
    command = [sys.executable, *program, "pulsetrain", *VERIFY, *([] if torchrun else ["--launch.nproc=2"])]

    def verified(status: int) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    assert verified(0).count("reproduced") == 1
    (run / "events" / "tail.rank1.jsonl").unlink()
    (run / "events" / "events.rank1.jsonl.zst").unlink()
    assert verified(1 if torchrun else 3).count("not proven") == 1
