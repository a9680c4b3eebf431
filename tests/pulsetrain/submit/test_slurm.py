"""Batch scripts for Slurm, and jobs that are interrupted and requeued."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.runs.summary import summarize
from pulsetrain.submit.cluster_job import ClusterJob
from pulsetrain.submit.slurm import script, submit
from pulsetrain.submit.submission import Resources, Submission
from tests.support.fake_slurm import install
from tests.support.training_jobs import loads, losses, until, write_run

pytest.importorskip("submitit")

GOLDEN = Path(__file__).with_name("golden_slurm.sh")
TRAIN = ("train", "base.yaml", "--folder=runs/a", "--resume=latest", "--wait")
NEEDS = Resources(
    processes=4, nodes=2, gpus=4, cpus=8, memory=64 * 1024, minutes=720, partition="gpu", account="vision"
)
SWEEP = (
    "config: base.yaml\nfolder: out\nsampler: grid\nmetric: val/loss\n"
    "space: {training.learning_rate: [1e-3, 1e-2, 2e-2, 3e-2]}\n"
)


def test_the_script_of_a_run_on_two_nodes() -> None:
    submission = Submission("a", (TRAIN,), Path("/data/runs/a/submit"), NEEDS)
    assert script(submission, "/opt/train/bin/python") == GOLDEN.read_text()


def test_a_sweep_is_an_array() -> None:
    commands = tuple(("sweep", "s.yaml", "--worker", str(index)) for index in range(3))
    text = script(Submission("s", commands, Path("/data/s/submit"), Resources(gpus=1)), "python")
    assert "#SBATCH --array=0-2%3" in text.splitlines()
    assert "#SBATCH --output=/data/s/submit/%A_%a_0_log.out" in text.splitlines()


def test_names_are_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "a b'c\"d;$(touch executed)`touch executed`" / "submit"
    text = script(Submission("a", (TRAIN,), folder, Resources()), "/my python/bin/python")
    command = text.splitlines()[-1]
    assert shlex.split(command)[-5:] == ["/my python/bin/python", "-u", "-m", "submitit.core._submit", str(folder)]
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, check=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["gpu\n#SBATCH --uid=0", "gpu;x", "$(x)", "a b", ""])
@pytest.mark.parametrize("option", ["partition", "account"])
def test_a_partition_or_account_that_is_not_a_name_is_refused(option: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{option}"):
        script(Submission("a", (TRAIN,), Path("runs/a/submit"), replace(NEEDS, **{option: name})))


def test_a_folder_in_whose_name_slurm_replaces_letters_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has a % in its name"):
        script(Submission("a", (TRAIN,), Path("runs/50%j/submit"), NEEDS))


def test_the_reason_of_sbatch_is_reported_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    submission = Submission("a", (TRAIN,), tmp_path / "runs" / "submit", Resources(partition="closed"))
    with pytest.raises(ConfigurationError, match="sbatch rejected the job: sbatch: error: invalid partition"):
        submit(submission)
    assert not list(submission.folder.iterdir())


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    state = install(tmp_path / "bin")
    write_run(tmp_path, pause=0.03)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_is_preempted_is_requeued_and_resumes(slurm: Path, processes: int) -> None:
    words = ["--launch.nproc", str(processes)]
    assert main(["submit", "base.yaml", "--to", "slurm", "--run", "a", *words]) == 0
    until(lambda: list(Path("a/checkpoints").glob("0*/manifest.json")))
    os.killpg(int((slurm / "group-71").read_text()), signal.SIGUSR2)  # as Slurm does, to all processes of the step
    until(lambda: (slurm / "ended-71").exists())
    assert (slurm / "ended-71").read_text() == "0", Path("a/submit/71_0_log.out").read_text()
    assert loads(Path("a")) == 1, Path("a/submit/71_0_log.out").read_text()
    straight = ["train", "base.yaml", "--run", "straight", *words]
    assert subprocess.run([sys.executable, "-m", "pulsetrain", *straight], capture_output=True).returncode == 0
    assert losses(Path("a")) == losses(Path("straight"))


@pytest.mark.slow
def test_the_workers_of_a_sweep_share_out_its_trials(slurm: Path) -> None:
    write_run(Path())
    Path("s.yaml").write_text(SWEEP)
    assert main(["submit", "s.yaml", "--to", "slurm", "--workers", "2"]) == 0
    until(lambda: (slurm / "ended-72").exists() and (slurm / "ended-73").exists())
    assert [(slurm / f"ended-{job}").read_text() for job in (72, 73)] == ["0", "0"]
    from pulsetrain.sweep.results import read_results

    trials = read_results(Path("out")).trials
    assert [(each.number, each.state) for each in trials] == [(number, "completed") for number in range(4)]
    assert sorted(each.params["training.learning_rate"] for each in trials) == [1e-3, 1e-2, 2e-2, 3e-2]
    assert Path("out/best.yaml").exists()


@pytest.mark.slow
def test_a_job_of_submitits_local_executor_is_interrupted_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import submitit

    write_run(tmp_path, pause=0.03)
    monkeypatch.chdir(tmp_path)
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=10)
    job = executor.submit(ClusterJob(["train", "base.yaml", "--folder=a", "--resume=latest", "--wait"]))
    until(lambda: list(Path("a/checkpoints").glob("0*/manifest.json")))
    (task,) = Path(f"/proc/{job.job_id}/task/{job.job_id}/children").read_text().split()
    os.kill(int(task), signal.SIGUSR2)
    assert job.result() == 0
    assert loads(Path("a")) == 1
    assert max(losses(Path("a"))) == 60


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_job_that_gets_sigterm_waits_for_slurm_to_requeue_or_to_end_it(tmp_path: Path, command: str) -> None:
    """A job that ends before that, or fails, is not requeued."""
    write_run(tmp_path, pause=0.03)
    (tmp_path / "s.yaml").write_text(SWEEP)
    words = {"train": ["train", "base.yaml", "--folder=out"], "sweep": ["sweep", "s.yaml", "--workers=1"]}[command]
    program = "from pulsetrain.submit import cluster_job; cluster_job._wait_for_end = lambda: print('waits')\n"
    task = subprocess.Popen(
        [sys.executable, "-c", f"{program}cluster_job.ClusterJob({words})()"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: list(tmp_path.glob("out/**/checkpoints/0*/manifest.json")))
    (child,) = Path(f"/proc/{task.pid}/task/{task.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGTERM)
    printed, errors = task.communicate()
    assert printed.splitlines()[-1] == "waits", errors
    assert task.returncode == 143, errors


@pytest.mark.slow
def test_a_sweep_that_is_to_be_requeued_has_stopped_its_trial_before(tmp_path: Path) -> None:
    """Slurm ends what is left of a job that is requeued, such as a trial that has not saved yet."""
    write_run(tmp_path, pause=0.1)
    (tmp_path / "s.yaml").write_text(SWEEP)
    program = (
        "import signal, sys\n"
        "from pulsetrain.submit.cluster_job import ClusterJob\n"
        "job = ClusterJob(['sweep', 's.yaml', '--workers=1'])\n"
        "signal.signal(signal.SIGUSR2, lambda number, frame: (job.checkpoint(), sys.exit(7)))\n"
        "job()"
    )
    slurm = {**os.environ, "SLURM_JOB_ID": "71", "SLURM_PROCID": "0"}
    task = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=slurm, stderr=subprocess.DEVNULL, start_new_session=True
    )
    until(lambda: list(tmp_path.glob("out/trials/*/checkpoints/0*/manifest.json")))
    os.killpg(task.pid, signal.SIGUSR2)
    assert task.wait() == 7
    (trial,) = (file.parent for file in tmp_path.glob("out/trials/*/run.json"))
    assert summarize(trial).status == "stopped"


@pytest.mark.slow
def test_a_command_that_fails_fails_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="pulsetrain train ended with status 2"):
        ClusterJob(["train", "missing.yaml"])()
