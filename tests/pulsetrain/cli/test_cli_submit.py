"""`pulsetrain submit`, as a user starts it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from pulsetrain.cli import main, queue_table, submit
from pulsetrain.submit import queue_process, submission
from pulsetrain.submit.local_queue import LocalQueue, taken_lock
from tests.support.training_jobs import kill_all, loads, losses, until, write_run

Streams = pytest.CaptureFixture[str]
SWEEP = (
    "config: base.yaml\nfolder: out\nsampler: grid\nmetric: val/loss\nspace: {training.learning_rate: [1e-3, 1e-2]}\n"
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    work = tmp_path / "work"
    work.mkdir()
    write_run(work)
    (work / "s.yaml").write_text(SWEEP)
    monkeypatch.chdir(work)
    monkeypatch.setenv("PULSETRAIN_QUEUE", str(tmp_path / "queue"))
    yield work
    kill_all(str(tmp_path))
    for child in queue_process._started:
        child.wait()
    queue_process._started.clear()


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("base.yaml --to slurm", "the program sbatch was not found; run this command on a login node"),
        ("base.yaml --to kubernetes --run a --image i", "the program kubectl was not found; install it, or --print"),
    ],
)
def test_a_scheduler_that_is_not_there_is_named_and_nothing_is_left(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: Streams, words: str, expected: str
) -> None:
    monkeypatch.setenv("PATH", str(base))
    before = files(base)
    assert main(["submit", *words.split()]) == 2
    errors = capsys.readouterr().err
    assert expected in errors
    assert len(errors.splitlines()) == 1
    assert files(base) == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--to local", "CONFIG: is missing"),
        ("missing.yaml --to local", "missing.yaml: there is no such file"),
        ("base.yaml --to local --time 1:00:00", "--time: is for --to slurm, not for local"),
        ("base.yaml --to local --gpus 0", "--gpus: is for --to slurm or kubernetes, not for local"),
        ("base.yaml --to local --image x", "--image: is for --to kubernetes"),
        ("base.yaml --to slurm --devices 2", "--devices: is for --to local"),
        ("base.yaml --to slurm --cpus 0", "--cpus 0: needs a whole number"),
        (
            f"base.yaml --to local --restarts {10**30}",
            "--restarts 1000000000000000000000000000000: needs a whole number",
        ),
        (f"base.yaml --to local --devices {10**30}", "0: needs a whole number from 1 to 100,000"),
        ("s.yaml --to local --workers 999999999", "--workers 999999999: needs a whole number from 1 to 100,000"),
        ("base.yaml --to slurm --time 4:00", "write 4:00:00 for 4 hours"),
        ("base.yaml --to slurm --launch.min_nproc 1", "--launch.min_nproc: is for --to local"),
        ("base.yaml --to local --launch.nnodes 2", "--launch.nnodes=2: --to local is one machine"),
        ("base.yaml --to local --launch.nproc 3 --devices 2", "the queue of this machine has 2 device(s)"),
        ("base.yaml --to local --training.learning_rat 1", "learning_rat"),
        ("base.yaml --to local --parallel.shrad 2", "shrad"),
        ("base.yaml --to local --training.device cuda:77", "is not on this machine; choose one of cpu"),
        ("base.yaml --to local --workers 2", "--workers: is for sweeps"),
        ("s.yaml --to local --training.seed 2", "--training.seed: s.yaml is a sweep"),
        ("base.yaml --to kubernetes --run a", "--image: is missing"),
        ("base.yaml --to kubernetes --image x", "name the folder, such as --run runs/a"),
        ("base.yaml --to slurm --status", "--status: is for the queue of this machine"),
        ("--to local --cancel 7", "job 7: is not in the queue"),
        (f"--to local --cancel {10**30}", "job 1000000000000000000000000000000: is not in the queue"),
        ("base.yaml --to slurm --data.init_args.api_key x7 --print", "api_key"),
    ],
)
def test_wrong_input_is_refused_and_nothing_is_left(base: Path, capsys: Streams, words: str, expected: str) -> None:
    before = files(base)
    assert main(["submit", *words.split()]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert "x7" not in captured.err + captured.out
    assert files(base) == before


TO = ("local", "slurm", "kubernetes --image i --run a")


@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("config", ["base.yaml", "s.yaml"])
def test_a_configuration_that_cannot_resume_is_refused_before_it_is_submitted(
    base: Path, capsys: Streams, config: str, to: str
) -> None:
    head = (base / "base.yaml").read_text().partition("handlers:")[0]
    own = "\nfrom pulsetrain.handlers import Checkpointer\n\nclass Own(Checkpointer): ...\n"
    (base / "tiny.py").write_text((base / "tiny.py").read_text() + own)
    words = ["submit", config, "--to", *to.split(), "--print"]
    for handlers, message in (
        ("EventRecorder", "there is no Checkpointer; add Checkpointer to `handlers`"),
        (
            "EventRecorder, Checkpointer, pulsetrain.handlers.Checkpointer",
            "there are 2 Checkpointers: handlers[1], handlers",
        ),
    ):
        (base / "base.yaml").write_text(f"{head}handlers: [{handlers}]\n")
        before = files(base)
        assert main(words) == 2
        assert f"base.yaml: handlers: a run that is interrupted resumes from its checkpoints, and {message}" in (
            capsys.readouterr().err
        )
        assert files(base) == before
    (base / "base.yaml").write_text(f"{head}handlers: [EventRecorder, tiny.Own]\n")
    assert main(words) == 0


def test_print_submits_nothing(base: Path, capsys: Streams) -> None:
    before = files(base)
    assert main(["submit", "base.yaml", "--to", "slurm", "--print", "--launch.nproc", "2", "--training.seed", "4"]) == 0
    printed = capsys.readouterr().out
    assert "#SBATCH --ntasks-per-node=2" in printed
    assert "gpus" not in printed  # the configuration trains on the CPU
    assert printed.splitlines()[-1] == (
        "# pulsetrain train base.yaml --training.seed=4 --folder=runs/base-1 --resume=latest --wait"
    )
    assert main(["submit", "s.yaml", "--to", "slurm", "--print", "--workers", "3"]) == 0
    assert "#SBATCH --array=0-2%3" in capsys.readouterr().out
    assert main(["submit", "base.yaml", "--to", "local", "--print", "--launch.nproc", "2"]) == 0
    assert capsys.readouterr().out == (
        "2 device(s): pulsetrain train base.yaml --launch.nproc=2 --folder=runs/base-1 --resume=latest --wait\n"
    )
    words = ["--image", "team/train:1", "--claim", "data:/data", "--parallel.shard", "2", "--training.device", "cuda"]
    assert main(["submit", "base.yaml", "--to", "kubernetes", "--print", "--run", "runs/a", *words]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    (container,) = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert files(base) == before


def test_what_is_printed_is_what_is_submitted(base: Path, monkeypatch: pytest.MonkeyPatch, capsys: Streams) -> None:
    from tests.support.fake_slurm import install

    pytest.importorskip("submitit")
    state = install(base / "bin")
    sbatch = f'#!{shutil.which("bash")}\ncp "$1" "{state}/script.sh"\necho Submitted batch job 71\n'
    (base / "bin" / "sbatch").write_text(sbatch)
    monkeypatch.setenv("PATH", f"{base / 'bin'}:{os.environ['PATH']}")
    words = ["base.yaml", "--training.seed", "4", "--launch.nproc", "2"]
    for options in (["--to", "slurm", "--run", "a b'c", "--time", "90"], ["--to", "local", "--run", "d e'f"]):
        assert main(["submit", *words, *options, "--print"]) == 0
        printed = capsys.readouterr().out
        assert main(["submit", *words, *options, *(["--devices", "2"] if "local" in options else [])]) == 0
        capsys.readouterr()
        if "slurm" in options:
            assert printed.startswith((state / "script.sh").read_text())
            submitit = pytest.importorskip("submitit.core.utils")
            (pickled,) = Path("a b'c/submit").glob("*_submitted.pkl")
            submitted = submitit.DelayedSubmission.load(pickled).function.words
        else:
            submitted = LocalQueue(Path(os.environ["PULSETRAIN_QUEUE"])).jobs()[0].words
        assert shlex.split(printed.splitlines()[-1].partition("pulsetrain ")[2]) == list(submitted)


def test_a_full_disk_is_one_line(base: Path) -> None:
    """No file can grow beyond 4 KiB, as where the disk of the queue is nearly full."""
    LocalQueue(Path(os.environ["PULSETRAIN_QUEUE"])).devices = [""]
    program = (
        "import resource, sys\n"
        "from pulsetrain.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "sys.exit(main(['submit', 'base.yaml', '--to', 'local', '--run', 'a']))"
    )
    # -B: Python 3.11 keeps the compiled file of an import that was cut off
    done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert re.search(r"queue\.sqlite: cannot be read or written: .*disk.*; make room on its disk", done.stderr)
    assert len(done.stderr.splitlines()) == 1
    assert not Path("a").exists()


def test_a_credential_of_the_environment_is_in_no_file(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: Streams
) -> None:
    from tests.support.fake_slurm import install

    pytest.importorskip("submitit")
    install(base / "bin")
    (base / "bin" / "sbatch").write_text(f"#!{shutil.which('bash')}\necho Submitted batch job 71\n")
    monkeypatch.setenv("PATH", f"{base / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2hunter2")
    assert main(["submit", "base.yaml", "--to", "slurm", "--run", "a"]) == 0
    assert "submitted      71" in capsys.readouterr().out
    written = [path for path in (base / "a").rglob("*") if path.is_file()]
    assert len(written) >= 2
    assert not [path for path in written if b"hunter2" in path.read_bytes()]


def test_two_submissions_get_two_folders(base: Path, capsys: Streams) -> None:
    queue = LocalQueue(Path(os.environ["PULSETRAIN_QUEUE"]))
    for number in (1, 2):
        assert main(["submit", "base.yaml", "--to", "local", "--devices", "1"]) == 0
        assert f"folder         runs/base-{number}\n" in capsys.readouterr().out
    assert [job.name for job in queue.jobs()] == ["runs/base-1", "runs/base-2"]
    assert main(["submit", "--to", "local", "--cancel", "2"]) == 0
    assert main(["submit", "--to", "local", "--status"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "job 2: cancelled"
    assert rows[1].split() == ["job", "state", "devices", "interruptions", "time", "name", "output"]
    assert rows[3].split()[:3] == ["2", "cancelled", "-"]


def test_the_devices_are_those_of_the_first_submission_while_jobs_are_left(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: Streams
) -> None:
    monkeypatch.setattr(queue_process, "ensure_running", lambda queue: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    queue = LocalQueue(Path(os.environ["PULSETRAIN_QUEUE"]))

    def submit_with(gpus: str, folder: str, *words: str) -> str:
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus.split(",")) if gpus else 0)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        assert main(["submit", "base.yaml", "--to", "local", "--run", folder, *words]) == 0
        return capsys.readouterr().err

    assert submit_with("", "a") == ""
    assert queue.devices == ["", "", ""]
    assert (
        "keeps its devices while jobs are left: 3 slot(s) without a GPU; visible here: GPU 4, 5, which --devices 2"
        in (submit_with("4,5", "b"))
    )
    assert queue.devices == ["", "", ""]
    for job in queue.jobs():
        queue.cancel(job.id)
    assert submit_with("4,5", "c") == ""
    assert queue.devices == ["4", "5"]
    assert "while jobs are left: GPU 4, 5; visible here: GPU 6" in submit_with("6", "d")
    assert submit_with("6", "e", "--devices", "1") == ""
    assert queue.devices == ["6"]


def test_a_sweep_whose_storage_is_not_that_of_the_running_queue_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: Streams
) -> None:
    queue = LocalQueue(Path(os.environ["PULSETRAIN_QUEUE"]))
    with monkeypatch.context() as there:
        there.setenv("PULSETRAIN_SWEEP_STORAGE", "postgresql://me:hunter2@first/a")
        queue_process.QueueProcess(queue).run()  # it ends: there are no jobs
    assert b"hunter2" not in queue.file.read_bytes()
    monkeypatch.setattr(queue_process, "ensure_running", lambda queue: None)
    held = taken_lock(queue.lock)
    assert held is not None
    refused = (
        ("postgresql://me:hunter2@second/a", "is postgresql://[redacted]@second/a here, and postgresql://[redacted]@f"),
        ("", "is not set here, and postgresql://[redacted]@first/a where the queue of this machine was started"),
    )
    for url, message in refused:
        monkeypatch.setenv("PULSETRAIN_SWEEP_STORAGE", url)
        assert main(["submit", "s.yaml", "--to", "local"]) == 2
        error = capsys.readouterr().err
        assert f"PULSETRAIN_SWEEP_STORAGE: {message}" in error
        assert "hunter2" not in error
    assert queue.jobs() == []
    monkeypatch.setenv("PULSETRAIN_SWEEP_STORAGE", "postgresql://me:hunter2@first/a")
    assert main(["submit", "s.yaml", "--to", "local"]) == 0
    os.close(held)
    monkeypatch.setenv("PULSETRAIN_SWEEP_STORAGE", "")  # this command starts the queue
    assert main(["submit", "s.yaml", "--to", "local", "--run", "b"]) == 0


def submit_at_once(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[int]:
    """The exit statuses of two submissions that choose their folders before either has made its own."""
    barrier, chosen = threading.Barrier(2), set[int]()

    def check_words(words: Sequence[str]) -> None:
        if threading.get_ident() not in chosen:
            chosen.add(threading.get_ident())
            barrier.wait(60)
        submission.check_words(words)

    monkeypatch.setattr(submit, "check_words", check_words)
    monkeypatch.setattr(queue_process, "ensure_running", lambda queue: None)
    LocalQueue(Path(os.environ["PULSETRAIN_QUEUE"])).devices = [""]
    with ThreadPoolExecutor(2) as threads:
        rates = [f"--training.learning_rate={rate}" for rate in (1e-3, 1e-2)]
        return list(threads.map(lambda rate: main(["submit", "base.yaml", "--to", "local", *words, rate]), rates))


def test_two_submissions_at_once_get_two_folders(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert submit_at_once(monkeypatch) == [0, 0]
    jobs = LocalQueue(Path(os.environ["PULSETRAIN_QUEUE"])).jobs()
    assert sorted(job.name for job in jobs) == ["runs/base-1", "runs/base-2"]
    assert all(f"--folder={job.name}" in job.words for job in jobs)
    rates = [word for job in jobs for word in job.words if "learning_rate" in word]
    assert sorted(rates) == ["--training.learning_rate=0.001", "--training.learning_rate=0.01"]


@pytest.mark.parametrize("exists", [False, True])
def test_of_two_submissions_at_once_of_one_folder_one_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: Streams, exists: bool
) -> None:
    if exists:
        Path("a").mkdir()
    assert sorted(submit_at_once(monkeypatch, "--run", "a")) == [0, 2]
    assert "run folder a: a job for it was submitted already" in capsys.readouterr().err
    assert len(LocalQueue(Path(os.environ["PULSETRAIN_QUEUE"])).jobs()) == 1


def test_jobs_outlive_ctrl_c_during_wait(base: Path, monkeypatch: pytest.MonkeyPatch, capsys: Streams) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(queue_table.time, "sleep", stop)
    assert main(["submit", "base.yaml", "--to", "local", "--run", "a", "--devices", "1", "--wait"]) == 130
    assert "the jobs continue; `pulsetrain submit --to local --status`" in capsys.readouterr().err
    assert LocalQueue(Path(os.environ["PULSETRAIN_QUEUE"])).job(1).state in ("waiting", "running")


def test_a_folder_whose_job_waits_is_refused(base: Path, capsys: Streams) -> None:
    (base / "a" / "submit").mkdir(parents=True)
    assert main(["submit", "base.yaml", "--to", "local", "--run", "a"]) == 2
    assert "run folder a: a job for it was submitted already" in capsys.readouterr().err


def test_wrong_settings_of_a_sweep_are_refused_before_it_is_submitted(base: Path, capsys: Streams) -> None:
    (base / "s.yaml").write_text(SWEEP.replace("learning_rate", "learning_rat"))
    assert main(["submit", "s.yaml", "--to", "local", "--print"]) == 2
    assert "space.training.learning_rat: " in capsys.readouterr().err


def test_a_population_is_one_job(base: Path, capsys: Streams) -> None:
    population = "sampler: population\npopulation: 4\ninterval: 10\nworkers: 2\n"
    space = "space: {training.learning_rate: {low: 1e-4, high: 1e-2}}\n"
    (base / "s.yaml").write_text(f"config: base.yaml\nfolder: out\nmetric: val/loss\n{space}{population}")
    assert main(["submit", "s.yaml", "--to", "local", "--print"]) == 0
    assert capsys.readouterr().out == "1 device(s): pulsetrain sweep s.yaml --folder=out\n"
    assert main(["submit", "s.yaml", "--to", "local", "--workers", "2"]) == 2
    assert "a population compares its members" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_jobs_of_a_queue_that_is_killed_resume_and_end_as_if_it_had_not_been(base: Path, capsys: Streams) -> None:
    write_run(base, pause=0.02)
    queue = LocalQueue(Path(os.environ["PULSETRAIN_QUEUE"]))
    hostile = "b 'c\" $(touch executed); `touch executed`"
    for folder in ("a", hostile):
        assert main(["submit", "base.yaml", "--to", "local", "--run", folder, "--devices", "1"]) == 0
    for folder in ("a", hostile):
        until(lambda folder=folder: list(Path(folder, "checkpoints").glob("0*/manifest.json")))  # type: ignore[misc]
        for text in (str(base.parent), "base.yaml"):
            kill_all(text)
        assert queue.job(1).state == ("running" if folder == "a" else "done")
        assert main(["submit", "--to", "local", "--status"]) == 0
        assert "the queue had stopped, and continues" in capsys.readouterr().err
    until(lambda: [job.state for job in queue.jobs()] == ["done", "done"])
    assert [job.interruptions for job in queue.jobs()] == [1, 1]
    command = [sys.executable, "-m", "pulsetrain", "train", "base.yaml", "--run", "straight"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    for folder in ("a", hostile):
        assert loads(Path(folder)) == 1
        assert losses(Path(folder)) == losses(Path("straight"))
    assert not (base / "executed").exists()


@pytest.mark.slow
def test_wait_reports_how_the_jobs_end(base: Path, capsys: Streams) -> None:
    assert main(["submit", "base.yaml", "--to", "local", "--run", "a", "--devices", "2", "--wait"]) == 0
    assert "job 1: done" in capsys.readouterr().out
    assert main(["submit", "base.yaml", "--to", "local", "--run", "a"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["submit", "base.yaml", "--to", "local", "--run", "a", "--resume", "latest", "--wait"]) == 0
    (base / "tiny.py").write_text("raise RuntimeError('broken')")
    queue = LocalQueue(Path(os.environ["PULSETRAIN_QUEUE"]))
    (number,) = queue.add(
        [["train", "base.yaml", "--folder=b"]], name="b", directory=base, python=sys.executable, output=base / "b",
        devices=1, restarts=1,
    )  # fmt: skip
    assert main(["submit", "--to", "local", "--status"]) == 0
    until(lambda: queue.job(number).state == "failed")
    assert "broken" in Path(queue.job(number).output).read_text()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_sweep_is_shared_out_by_two_jobs_and_survives_the_kill_of_both(base: Path) -> None:
    write_run(base, pause=0.01)
    (base / "s.yaml").write_text(SWEEP.replace("[1e-3, 1e-2]", "[1e-3, 1e-2, 2e-2, 3e-2]"))
    queue = LocalQueue(Path(os.environ["PULSETRAIN_QUEUE"]))
    assert main(["submit", "s.yaml", "--to", "local", "--workers", "2", "--devices", "2"]) == 0
    until(lambda: len(list(Path("out/trials").glob("*/checkpoints/*/manifest.json"))) > 2)
    for text in (str(base.parent), "s.yaml"):
        kill_all(text)
    assert main(["submit", "--to", "local", "--status"]) == 0
    until(lambda: [job.state for job in queue.jobs()] == ["done", "done"])
    from pulsetrain.sweep.results import read_results

    trials = read_results(Path("out")).trials
    assert [each.state for each in trials] == ["completed"] * 4
    assert sorted(each.params["training.learning_rate"] for each in trials) == [1e-3, 1e-2, 2e-2, 3e-2]
    assert Path("out/best.yaml").exists()
