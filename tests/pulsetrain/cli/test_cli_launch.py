"""`pulsetrain train` in several processes: started by itself or by torchrun, killed, stopped, and resumed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pulsetrain.cli import main, results
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.recording import EventLog
from tests.support.ports import free_port
from tests.support.programs_examples import EXAMPLES

RUN = [
    "--run=runs/a",
    "--handlers=[EventRecorder, CSVLogger, {class_path: Checkpointer, init_args: {every: {iterations: 5}}}]",
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def nodes(**changed: object) -> list[str]:
    """The options of a node of a run on two nodes, some of them changed."""
    given = {"nproc": 2, "nnodes": 2, "node_rank": 0, "master_addr": "localhost", "master_port": 29400, **changed}
    return [f"--launch.{name}={value}" for name, value in given.items()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--launch.nprocs=2"],
            "--launch.nprocs: no such option; there are nproc, min_nproc, nnodes, node_rank, master_addr, master_port",
        ),
        (["--launch.nproc=none"], "--launch.nproc=none: needs a number of processes, at least 1"),
        (["--launch.nproc=0"], "--launch.nproc=0: needs a number of processes, at least 1"),
        (["--launch.min_nproc=1"], "--launch.min_nproc: needs --launch.nproc, the number of processes to start with"),
        (["--launch.nproc=1", "--launch.min_nproc=2"], "--launch.min_nproc=2: is more than --launch.nproc=1"),
        (
            ["--launch.nproc=2", "--launch.nnodes=2"],
            "--launch.node_rank: is missing; a run on several nodes needs, on each of them, nnodes, node_rank, "
            "master_addr, master_port",
        ),
        (nodes(nnodes=1), "--launch.nnodes=1: needs a whole number of at least 2"),
        (nodes(node_rank=2), "--launch.node_rank=2: nodes are counted from 0, and there are 2"),
        (nodes(master_port="x"), "--launch.master_port=x: needs a whole number of at least 1"),
        (nodes(min_nproc=1), "--launch.min_nproc=1: is for one machine, not for 2 nodes; leave it out"),
        (nodes()[1:], "--launch.nnodes: needs --launch.nproc, the number of processes to start with"),
    ],
)
def test_wrong_numbers_of_processes_are_refused(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "config.yaml", *words]) == 2
    assert f"pulsetrain: error: {said}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "by"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "Slurm"),
    ],
    ids=["torchrun", "srun"],
)
def test_processes_that_were_started_together_do_not_start_others(
    environment: dict[str, str],
    by: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "config.yaml", "--launch.nproc=2"]) == 2
    assert f"--launch.nproc=2: {by} has started 2 processes already, and each of them would" in capsys.readouterr().err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("environment", "command"),
    [
        ({}, "pulsetrain train c.yaml --run runs/a --resume latest --training.seed=1"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            "torchrun --nproc_per_node 2 -m pulsetrain train c.yaml --folder runs/a --resume latest --training.seed=1",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "start the processes as before, each with: "
            "pulsetrain train c.yaml --folder runs/a --resume latest --training.seed=1",
        ),
    ],
    ids=["one process", "torchrun", "two nodes"],
)
def test_the_command_that_resumes_a_run_starts_as_many_processes(
    environment: dict[str, str], command: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PULSETRAIN_LAUNCH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(results, "has_checkpoint", lambda trainer: True)
    monkeypatch.setattr(results, "program", lambda: ["pulsetrain"])
    assembly: Any = SimpleNamespace(trainer=None, folder=Path("runs/a"))
    assert results.resume_command(assembly, Path("c.yaml"), {"training.seed": "1"}) == f"resume: {command}"


@pytest.mark.parametrize(
    ("environment", "before", "command"),
    [
        ({}, [1], "python -m pulsetrain verify runs/a"),
        ({}, [2, 1], ""),
        ({"WORLD_SIZE": "2", "PULSETRAIN_LAUNCH": "--launch.nproc=2"}, [2], "p verify runs/a --launch.nproc=2"),
        ({"WORLD_SIZE": "2", "PULSETRAIN_LAUNCH": "--launch.nproc=3"}, [3, 2], ""),
        ({"WORLD_SIZE": "2"}, [2], ""),
    ],
    ids=["one process", "two before", "launched", "three before", "torchrun"],
)
def test_the_command_that_verifies_a_run_starts_as_many_processes(
    environment: dict[str, str], before: list[int], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PULSETRAIN_LAUNCH", "PULSETRAIN_PROGRAM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["/lib/pulsetrain/__main__.py"])
    monkeypatch.setattr(sys, "executable", "python")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("PULSETRAIN_PROGRAM", "p")
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)
    starts = [{"iteration": 5 * number, "processes": [{}] * count} for number, count in enumerate(before)]
    Path("runs/a/run.json").write_text(json.dumps({"format": 1, "starts": starts}))
    assert results.verify_command(Path("runs/a")) == command


def started(*words: str, torchrun: bool = False) -> subprocess.Popen[str]:
    alone = ["-c", "from pulsetrain.cli import main; raise SystemExit(main())"]  # as the script `pulsetrain`
    program = ["-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "pulsetrain"] if torchrun else alone
    command = [sys.executable, *program, "train", "config.yaml", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=ENVIRONMENT, start_new_session=True, **pipes)  # type: ignore[call-overload, no-any-return]


def ended(program: subprocess.Popen[str], status: int = 0) -> str:
    """What it wrote, once it has ended with this status."""
    try:
        out, err = program.communicate(timeout=300)
    finally:
        try:
            os.killpg(program.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert program.returncode == status, out + err
    return out + err


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_checkpoint(run: Path) -> None:
    deadline = time.monotonic() + 240
    while not any(run.glob("checkpoints/*/manifest.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [True, False], ids=["torchrun", "launch"])
def test_two_processes_train_one_run(torchrun: bool, folder: Path):
    words = [word.replace("--run", "--folder") for word in RUN]
    text = ended(started(*words, *([] if torchrun else ["--launch.nproc=2"]), torchrun=torchrun))
    assert text.count("run folder: runs/a") == text.count("trained     10 iterations, 10 updates, 2 epochs") == 1
    command = shlex.join([sys.executable, "-m", "pulsetrain"]) if torchrun else "pulsetrain"
    assert f"\nreport      {command} report runs/a" in text
    assert (f"\nverify      {command} verify runs/a --launch.nproc=2\n" in text) is not torchrun
    assert sorted(each.name for each in (folder / "runs").iterdir()) == ["a"]
    assert EventLog("runs/a").ended
    assert EventLog("runs/a").verify() == []
    assert main(["train", "config.yaml", "--run=runs/b", *RUN[1:]]) == 0
    rows = [len(Path(f"runs/{name}/metrics.csv").read_text().splitlines()) for name in "ab"]
    assert rows[0] == rows[1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_process_that_is_killed_is_started_again(folder: Path):
    program = started(*RUN, "--launch.nproc=2", "--training.max_epochs=400")
    wait_for_checkpoint(folder / "runs" / "a")
    os.kill(children_of(program.pid)[-1], signal.SIGKILL)
    text = ended(program)
    assert re.search(r"pulsetrain: rank \d was ended by signal 9; starting 2 again from the newest checkpoint", text)
    assert "trained     2,000 iterations" in text
    log = EventLog("runs/a")
    assert log.verify() == []
    assert [each.iteration for each in log.read(engine="trainer", event="iteration_completed")] == list(range(1, 2001))


@pytest.mark.slow
def test_processes_end_if_the_launcher_is_killed_while_one_of_them_hangs(folder: Path):
    (folder / "late.py").write_text(
        "import os, time\n"
        "from pulsetrain.engine import Events\n"
        "class Late:\n"
        "    def attach(self, engine):\n"
        "        if os.environ['RANK'] == '1':\n"
        "            engine.on(Events.ITERATION_COMPLETED(once=12))(lambda: time.sleep(300))\n"
    )
    handlers = RUN[1].replace("EventRecorder, ", "EventRecorder, late.Late, ")
    program = started(RUN[0], handlers, "--launch.nproc=2", "--training.max_epochs=400")
    wait_for_checkpoint(folder / "runs" / "a")
    ranks = children_of(program.pid)
    time.sleep(5.0)
    os.kill(program.pid, signal.SIGKILL)
    deadline = time.monotonic() + 40
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    text = ended(program, -signal.SIGKILL)
    assert not left
    assert "the launcher, where the processes of the run meet, has ended" in text
    assert len(text.splitlines()) < 400, "and not a stack for each look at the store"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("whom", ["the launcher", "one rank"])
def test_a_signal_ends_all_with_a_checkpoint_and_its_status(whom: str, name: str, folder: Path):
    number = signal.Signals[name]
    program = started(*RUN, "--launch.nproc=2", "--training.max_epochs=100000")
    wait_for_checkpoint(folder / "runs" / "a")
    os.kill(program.pid if whom == "the launcher" else children_of(program.pid)[-1], number)
    text = ended(program, 128 + number)
    (command,) = [line for line in text.splitlines() if line.startswith("resume: ")]
    assert "train config.yaml --run " in command
    assert command.endswith("--launch.nproc=2 --launch.min_nproc=2"), "it starts as many processes again"
    log = EventLog("runs/a")
    assert log.verify() == []
    (last,) = list(log.read(engine="trainer", event="completed"))
    latest = CheckpointManager(folder / "runs" / "a" / "checkpoints").get_latest()
    assert latest is not None
    assert load_checkpoint(latest)["counters"]["iteration"] == last.iteration


def tasks(*words: str, port: int) -> list[subprocess.Popen[str]]:
    """What srun starts: two tasks of a step, on a port that no other test uses."""
    step = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "MASTER_PORT": str(port)}
    step |= {"SLURM_STEP_NODELIST": "localhost"}
    command = [sys.executable, "-m", "pulsetrain", "train", "config.yaml", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return [
        subprocess.Popen(  # type: ignore[call-overload]
            command,
            text=True,
            env={**ENVIRONMENT, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            start_new_session=True,
            **pipes,
        )
        for rank in (0, 1)
    ]


@pytest.mark.slow
def test_tasks_of_srun_end_by_the_warning_and_the_requeued_ones_resume(folder: Path):
    words = [*RUN, "--training.max_epochs=100000", "--resume=latest"]
    first = tasks(*words, port=free_port())
    wait_for_checkpoint(folder / "runs" / "a")
    for each in first:
        os.kill(each.pid, signal.SIGUSR1)
    texts = [ended(each, 128 + signal.SIGUSR1) for each in first]
    assert [text.count("resume: start the processes as before, each with") for text in texts] == [1, 0]
    latest = CheckpointManager(folder / "runs" / "a" / "checkpoints").get_latest()
    assert latest is not None
    iteration = load_checkpoint(latest)["counters"]["iteration"]
    epochs = iteration // 5 + 2
    for each in tasks(*RUN, f"--training.max_epochs={epochs}", "--resume=latest", "--wait", port=free_port()):
        ended(each)
    log = EventLog("runs/a")
    assert log.verify() == []
    trained = [each.iteration for each in log.read(engine="trainer", event="iteration_completed")]
    assert trained == list(range(1, 5 * epochs + 1))


@pytest.mark.slow
def test_an_error_of_the_run_is_not_tried_again(folder: Path):
    text = ended(started(*RUN, "--launch.nproc=2", "--model.class_path=model.Late"), 1)
    assert text.count("it broke in the middle") >= 1
    assert "starting" not in text


@pytest.mark.slow
def test_the_example_compares_one_process_with_two(tmp_path: Path):
    command = [sys.executable, EXAMPLES / "distributed" / "compare.py", "--steps", "50"]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    for mode in ("ddp", "fsdp", "tensor", "pipeline"):
        apart = dict(re.findall(rf"{mode} and one, (\S+): at most (\S+) apart", done.stdout))
        assert list(apart) == ["weights", "train/loss", "val/loss"]
        assert float(apart["weights"]) < 1e-12
        assert float(apart["train/loss"]) < 1e-6  # a mean of float32 numbers
        assert float(apart["val/loss"]) < 1e-12
