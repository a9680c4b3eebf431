"""`pulsetrain bisect`: which setting, or which commit, makes a run worse."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pulsetrain.bisect import trials as trials_module
from pulsetrain.bisect.commits import _paths
from pulsetrain.bisect.trials import Trials, read_pair
from pulsetrain.cli import main
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording.log.run_file import read_run_file
from pulsetrain.reproduce.processes import processes_of
from tests.support.run_folders import write_run

MODEL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SCALE = 1.0

def net(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

def data(batch_size=8):
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    pairs = TensorDataset(inputs, SCALE * inputs.sum(1, keepdim=True))
    return DataLoader(pairs, batch_size, shuffle=True), DataLoader(pairs, 32)
"""
CONFIG = """
run: runs/{n}
model: {class_path: toy.net, init_args: {width: 8}}
data: {class_path: toy.data, init_args: {batch_size: 8}}
strategy: {class_path: supervised, init_args: {loss: mse}}
training: {max_epochs: 4, optimizer: adamw, learning_rate: 0.02, seed: 0}
handlers: [{class_path: Checkpointer, init_args: {every: {epochs: 1}}}, EventRecorder]
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b"}
ENVIRONMENT |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def pulsetrain(*words: str, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pulsetrain", *words]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.slow
def test_the_bad_setting_among_five_is_found_with_the_runs_that_prove_it(base: Path):
    pulsetrain("train", "config.yaml", "--run", "runs/good", cwd=base)
    changes = ["learning_rate=9.0", "weight_decay=0.01", "clip_grad_norm=5.0", "max_epochs=5"]
    words = [f"--training.{each}" for each in changes] + ["--model.init_args.width=9"]
    pulsetrain("train", "config.yaml", "--run", "runs/bad", *words, cwd=base)
    done = pulsetrain("bisect", "runs/good", "runs/bad", "--iterations", "16", "--format", "json", cwd=base)
    found = json.loads(done.stdout)
    assert found["causes"] == [["training.learning_rate"]]
    assert (found["start"], found["until"], found["metric"]) == (0, 16, "val/loss")
    values = {each["settings"]: each["value"] for each in found["runs"]}
    assert values["training.learning_rate"] > 10 * values["none"]
    for each in found["runs"]:
        described = read_run_file(base / each["run"])
        has_it = "max_epochs" in each["settings"] or "all" in each["settings"]
        assert described["settings"]["max_epochs"] == (5 if has_it else 4)  # type: ignore[index, call-overload]
    trained = {each: each.stat().st_mtime_ns for each in base.rglob("events/*")}
    assert len(trained) > len(found["runs"])
    again = pulsetrain("bisect", "runs/good", "runs/bad", "--iterations", "16", "--format", "json", cwd=base)
    assert json.loads(again.stdout) == found
    assert {each: each.stat().st_mtime_ns for each in base.rglob("events/*")} == trained, "nothing is trained again"
    text = pulsetrain("bisect", "runs/good", "runs/bad", "--iterations", "16", cwd=base).stdout
    assert "training.learning_rate: 0.02 -> 9.0" in text
    assert "without that, the other 4 settings give" in text


@pytest.mark.slow
def test_runs_of_a_fork_start_from_the_last_common_checkpoint(base: Path):
    pulsetrain("train", "config.yaml", "--run", "runs/good", cwd=base)
    words = ["--set", "training.learning_rate=9.0", "--set", "training.weight_decay=0.001"]
    pulsetrain("fork", "runs/good", "--at", "16", "--into", "runs/bad", *words, cwd=base)
    pulsetrain("train", "runs/bad/config.yaml", "--run", "runs/bad", "--resume", "latest", cwd=base)
    done = pulsetrain("bisect", "runs/good", "runs/bad", "--iterations", "8", "--format", "json", cwd=base)
    found = json.loads(done.stdout)
    assert (found["start"], found["until"], found["causes"]) == (16, 24, [["training.learning_rate"]])
    for each in found["runs"]:
        parent = read_run_file(base / each["run"])["parent"]
        assert (parent["iteration"], Path(parent["run"]).name) == (16, "good")  # type: ignore[index, call-overload, arg-type]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_killed_half_way_the_same_command_continues(base: Path):
    pulsetrain("train", "config.yaml", "--run", "runs/good", cwd=base)
    words = ["--training.learning_rate=9.0", "--training.weight_decay=0.001"]
    pulsetrain("train", "config.yaml", "--run", "runs/bad", *words, cwd=base)
    command = [sys.executable, "-m", "pulsetrain", "bisect", "runs/good", "runs/bad", "--format", "json"]
    process = subprocess.Popen(command, cwd=base, env=ENVIRONMENT, stdout=subprocess.PIPE, start_new_session=True)
    while not (base / "runs/bad-bisect/good.ended").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    first = (base / "runs/bad-bisect/good.ended").stat().st_mtime_ns
    found = json.loads(pulsetrain(*command[3:], cwd=base).stdout)
    assert found["causes"] == [["training.learning_rate"]]
    assert (base / "runs/bad-bisect/good.ended").stat().st_mtime_ns == first
    straight = json.loads(pulsetrain(*command[3:], "--into", "straight", cwd=base).stdout)
    assert [each["value"] for each in found["runs"]] == [each["value"] for each in straight["runs"]]
    answer = pulsetrain("bisect", "runs/good", "runs/bad", "--iterations", "8", cwd=base, status=2)
    assert "holds the runs of another question" in answer.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_settings_that_are_worse_only_together_are_found_by_a_metric_that_should_rise(base: Path):
    """Also arguments that only one of the runs gives, and a metric whose direction the run itself knows."""
    toy = (base / "toy.py").read_text()
    score = """
        class Score:
            higher_is_better = True
            def reset(self): self.sum = 0.0
            def update(self, predictions, targets): self.sum -= (predictions - targets).square().mean().item()
            def compute(self): return self.sum
        """
    data = "def data(batch_size=8, left=1.0, right=1.0):\n    scale = left * right if left > 1 < right else 1.0\n"
    toy = toy.replace("def data(batch_size=8):\n", data).replace("SCALE *", "scale *")
    (base / "toy.py").write_text(toy + textwrap.dedent(score))
    (base / "config.yaml").write_text(CONFIG + "metrics: {score: toy.Score}\n")
    pulsetrain("train", "config.yaml", "--run", "runs/good", cwd=base)
    changes = ["data.init_args.left=9.0", "data.init_args.right=9.0", "data.init_args.batch_size=7"]
    words = [f"--{each}" for each in changes]
    pulsetrain("train", "config.yaml", "--run", "runs/bad", *words, "--training.weight_decay=.1", cwd=base)
    command = ("bisect", "runs/good", "runs/bad", "--iterations", "8", "--format", "json")
    found = json.loads(pulsetrain(*command, "--metric", "val/score", cwd=base).stdout)
    assert found["causes"] == [["data.init_args.left", "data.init_args.right"]]
    values = {each["settings"]: each["value"] for each in found["runs"]}
    assert values["data.init_args.left, data.init_args.right"] < 10 * values["none"] < 0
    text = pulsetrain("bisect", "runs/good", "runs/bad", "--iterations", "8", "--metric", "val/score", cwd=base).stdout
    assert " only together with\n  data.init_args.left: not given -> 9.0\n" in text


@pytest.fixture
def held(base: Path) -> Path:
    """The base folder with a model that waits while there is a file `hold`, and says so in a file `waits`."""
    held = """
        import pathlib, time
        class Held(nn.Sequential):
            def forward(self, x):
                while pathlib.Path("hold").exists():
                    pathlib.Path("waits").touch()
                    time.sleep(0.05)
                return super().forward(x)
        """
    toy = (base / "toy.py").read_text().replace("return nn.Sequential(", "return Held(")
    (base / "toy.py").write_text(toy + textwrap.dedent(held))
    return base


def start(base: Path, *words: str) -> subprocess.Popen[str]:
    """`pulsetrain bisect` of runs/good and runs/bad, whose first run waits."""
    (base / "hold").touch()
    command = [sys.executable, "-m", "pulsetrain", "bisect", "runs/good", "runs/bad", "--iterations", "8", *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=base, env=ENVIRONMENT, text=True, **streams)  # type: ignore[call-overload]
    while not (base / "waits").exists():
        assert process.poll() is None
        time.sleep(0.05)
    return process  # type: ignore[no-any-return]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_run_that_a_killed_search_had_started_is_waited_for(held: Path):
    pulsetrain("train", "config.yaml", "--run", "runs/good", cwd=held)
    pulsetrain("train", "config.yaml", "--run", "runs/bad", "--training.learning_rate=9.0", cwd=held)
    killed = start(held)
    killed.kill()
    killed.communicate()
    again = start(held, "--format", "json")
    assert again.stderr is not None
    assert "waiting for the end of a run in runs/bad-bisect" in again.stderr.readline()
    (held / "hold").unlink()
    printed, errors = again.communicate()
    assert again.returncode == 0, errors
    found = json.loads(printed)
    assert found["causes"] == [["training.learning_rate"]]
    words = ("bisect", "runs/good", "runs/bad", "--iterations", "8", "--into", "straight", "--format", "json")
    straight = json.loads(pulsetrain(*words, cwd=held).stdout)
    assert [each["value"] for each in found["runs"]] == [each["value"] for each in straight["runs"]]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_runs_of_two_processes_are_searched_with_two_and_sigterm_stops_with_a_checkpoint(held: Path):
    pulsetrain("train", "config.yaml", "--run", "runs/good", "--launch.nproc=2", cwd=held)
    pulsetrain("train", "config.yaml", "--run", "runs/bad", "--training.learning_rate=9.0", cwd=held)
    process = start(held)
    process.terminate()
    (held / "hold").unlink()
    assert "the same command continues in runs/bad-bisect" in process.communicate()[1]
    assert process.returncode == 130
    assert list((held / "runs/bad-bisect/good/checkpoints").glob("0*/manifest.json"))
    done = pulsetrain("bisect", "runs/good", "runs/bad", "--iterations", "8", cwd=held)
    assert "runs/good was trained by 2 processes, runs/bad by 1 process; every run here has as many" in done.stderr
    assert processes_of(held / "runs/bad-bisect/bad")[0].processes == 2


@pytest.mark.slow
def test_a_run_that_is_killed_counts_as_failed(base: Path):
    """As the kernel does where memory is short; the search does not wait for it to get better."""
    check = "def data(batch_size=8, flag=0):\n    import os\n    if flag: os.kill(os.getpid(), 9)\n"
    toy = (base / "toy.py").read_text()
    (base / "toy.py").write_text(toy.replace("def data(batch_size=8):\n", "def data(batch_size=8, flag=0):\n"))
    for name, words in (("good", []), ("bad", ["--data.init_args.flag=1", "--training.learning_rate=9.0"])):
        pulsetrain("train", "config.yaml", "--run", f"runs/{name}", *words, cwd=base)
    (base / "toy.py").write_text(toy.replace("def data(batch_size=8):\n", check))
    answer = pulsetrain("bisect", "runs/good", "runs/bad", "--iterations", "8", cwd=base, status=2)
    assert "bad: a control failed: it was ended by signal 9, perhaps for want of memory" in answer.stderr


@pytest.mark.slow
def test_the_first_bad_commit_is_found(base: Path):
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=base, env=ENVIRONMENT, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    (base / ".gitignore").write_text("runs\n__pycache__\n")
    commits = []
    for number in range(6):
        text = textwrap.dedent(MODEL).replace("SCALE = 1.0", f"SCALE = {100.0 if number >= 3 else 1.0}  # {number}")
        (base / "toy.py").write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", f"change {number}")
        commits.append(git("rev-parse", "HEAD"))
        if number in (0, 5):
            pulsetrain("train", "config.yaml", "--run", f"runs/{number}", cwd=base)
    (base / "toy.py").write_text("my own work")
    command = [sys.executable, "-m", "pulsetrain", "bisect", "runs/0", "runs/5", "--git", "--iterations", "8"]
    killed = subprocess.Popen(command, cwd=base, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (base / f"runs/5-bisect/{commits[0][:12]}.txt").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()  # its checkout stays
    killed.wait()
    done = pulsetrain(*command[3:], cwd=base)
    assert f"the first commit with a worse val/loss:\n  {commits[3][:12]} change 3" in done.stdout
    assert (base / "toy.py").read_text() == "my own work"
    assert git("worktree", "list").count("\n") == 0
    assert not (base / "runs/5-bisect/checkout").exists()
    assert git("status", "--porcelain") == "M toy.py"
    answer = pulsetrain("bisect", "runs/0", "runs/0", "--git", cwd=base, status=2)
    assert "leave --git out" in answer.stderr


@pytest.mark.slow
def test_short_runs_of_exchanged_runs_end_the_search(base: Path):
    pulsetrain("train", "config.yaml", "--run", "runs/good", cwd=base)
    pulsetrain("train", "config.yaml", "--run", "runs/bad", "--training.learning_rate=9.0", cwd=base)
    answer = pulsetrain("bisect", "runs/bad", "runs/good", "--iterations", "8", cwd=base, status=2)
    assert "runs/good is better than runs/bad in the short runs: val/loss is " in answer.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_settings_that_fail_are_named_and_do_not_count(base: Path):
    """One of a pair of arguments that fit only each other fails; the bad rate is found all the same."""
    toy = (base / "toy.py").read_text()
    check = "def data(batch_size=8, drop=2):\n    assert drop * 4 == batch_size, 'drop does not fit'\n"
    (base / "toy.py").write_text(toy.replace("def data(batch_size=8):\n", check))
    config = CONFIG.replace("{batch_size: 8}", "{batch_size: 8, drop: 2}")
    (base / "config.yaml").write_text(config)
    pulsetrain("train", "config.yaml", "--run", "runs/good", cwd=base)
    words = ["--data.init_args.batch_size=16", "--data.init_args.drop=4", "--training.learning_rate=9.0"]
    pulsetrain("train", "config.yaml", "--run", "runs/bad", *words, cwd=base)
    done = pulsetrain("bisect", "runs/good", "runs/bad", "--iterations", "12", cwd=base)
    assert "training.learning_rate: 0.02 -> 9.0" in done.stdout
    assert "failed, which may hide a cause" in done.stdout
    assert "drop does not fit" in done.stdout


def wrong(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["bisect", *words]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", [1.0, 0.5], rate=0.1)
    write_run(tmp_path / "b", [1.0, 0.6], rate=0.1)
    write_run(tmp_path / "c", [1.0, 0.9], rate=0.2)
    bare = write_run(tmp_path / "bare", [1.0])
    (bare / "config.yaml").unlink()
    assert "nowhere: does not exist; name a run folder" in wrong(capsys, "nowhere", "a")
    assert "bare: has no config.yaml" in wrong(capsys, "a", "bare")
    assert "have the same settings; --git compares" in wrong(capsys, "a", "b")
    assert "--metric val/none: is not a metric of both runs; these are: val/loss" in wrong(
        capsys, "a", "c", "--metric", "val/none"
    )
    said = wrong(capsys, "a", "c", "--metric", "val/other")
    assert "whether it should fall or rise is not known; add --mode min or --mode max" in said
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "bisect.json").touch()
    assert "broken: holds the runs of another question" in wrong(capsys, "a", "c", "--into", "broken")
    (tmp_path / "file").touch()
    assert "file" in wrong(capsys, "a", "c", "--into", "file/into")
    assert main(["archive", "a", "--into", "."]) == 0
    assert "a.run.zip: is an archive, and `pulsetrain bisect` needs a folder; unpack it" in wrong(
        capsys, "a.run.zip", "c"
    )
    assert "iterations=0" in wrong(capsys, "a", "c", "--iterations", "0")
    assert "--mode max: needs --metric" in wrong(capsys, "a", "c", "--mode", "max")
    assert "not a git repository" in wrong(capsys, "a", "c", "--git", "--into", "by-git")
    assert not (tmp_path / "by-git").exists()
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / "mine.txt").write_text("precious")
    assert "into: is not empty" in wrong(capsys, "a", "c", "--into", "into")
    assert (tmp_path / "into" / "mine.txt").read_text() == "precious"


def test_a_control_that_cannot_be_trained_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[Any]):
    for name, rate in (("a", 0.1), ("c", 0.2)):
        write_run(tmp_path / name, [1.0, rate], rate=rate)
    said = wrong(capsys, str(tmp_path / "a"), str(tmp_path / "c"))
    assert "a control failed" in said


@pytest.mark.parametrize(
    ("good", "bad", "noise", "said"),
    [
        (0.5, 0.5, 0.0, "the short runs show no difference: val/loss is 0.5 with the settings of .*/a and 0.5 with "),
        (0.5, 0.4, 0.2, "the short runs show no difference: .* longer with --iterations, or choose a smaller --noise "),
        (
            0.5,
            0.4,
            0.0,
            "/b is better than .*/a in the short runs: val/loss is 0.4 and 0.5 after 8 iterations; exchange",
        ),
    ],
)
def test_controls_of_which_the_bad_one_is_not_worse_end_the_search(
    tmp_path: Path, good: float, bad: float, noise: float, said: str, monkeypatch: pytest.MonkeyPatch
):
    a, b = (write_run(tmp_path / name, [1.0], rate=rate) for name, rate in (("a", 0.1), ("b", 0.2)))
    pair = read_pair(a, b, None)
    monkeypatch.setattr(
        trials_module, "summarize", lambda folder: SimpleNamespace(last={"val/loss": float(folder.name)}, iteration=8)
    )
    with Trials(pair, tmp_path / "into", 8, noise) as trials, pytest.raises(ConfigurationError, match=said):
        trials.controls_of(lambda name: trials.add(name, "", lambda folder: ""), (str(good), f"{bad}0"))


def test_recorded_runs_that_are_exchanged_are_not_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", [1.0, 0.5], rate=0.1)
    write_run(tmp_path / "c", [1.0, 0.9], rate=0.2)
    said = wrong(capsys, "c", "a")
    assert "a is better than c as recorded: val/loss is 0.5 and 0.9 after 10 iterations; exchange GOOD and BAD" in said
    assert said.endswith(", or add --metric val/loss --mode max if higher values are better\n")
    assert not (tmp_path / "a-bisect").exists()
    for words in (["--iterations", "9"], ["--noise", "0.5"], ["--metric", "val/loss", "--mode", "max"]):
        assert "a control failed" in wrong(capsys, "c", "a", *words, "--into", words[1])
    write_run(tmp_path / "long", [1.0, 0.9, 0.9], rate=0.2)
    assert "a control failed" in wrong(capsys, "long", "a")


def test_damaged_logs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", [1.0, 0.5], rate=0.1)
    write_run(tmp_path / "c", [1.0, 0.9], rate=0.2)
    log = tmp_path / "c" / "events" / "tail.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(b"?" * (b"val/loss" in each) + each for each in lines))
    damage = "c: tail.jsonl: damaged lines: 2"
    said = wrong(capsys, "a", "c")
    assert "no metric of a and c is known to improve" in said
    assert damage in said
    assert "`pulsetrain events RUN --check` lists what is lost" in said
    assert damage in wrong(capsys, "a", "c", "--metric", "val/loss")
    log.write_bytes(b"".join(b"?" * (number == 3) + each for number, each in enumerate(lines)))
    said = wrong(capsys, "a", "c")
    assert said.startswith("pulsetrain: damaged: c: tail.jsonl: damaged lines: 1")
    assert "a control failed" in said


@pytest.mark.parametrize("good", [math.nan, math.inf])
def test_nothing_is_worse_than_nan_or_infinity(tmp_path: Path, good: float, monkeypatch: pytest.MonkeyPatch):
    a, b = (write_run(tmp_path / name, [1.0], rate=rate) for name, rate in (("a", 0.1), ("b", 0.2)))
    pair = read_pair(a, b, None)
    monkeypatch.setattr(
        trials_module, "summarize", lambda folder: SimpleNamespace(last={"val/loss": float(folder.name)}, iteration=8)
    )
    said = f"val/loss is {good} with the settings of"
    with Trials(pair, tmp_path / "into", 8) as trials, pytest.raises(ConfigurationError, match=said):
        trials.controls_of(lambda value: trials.add(str(value), "", lambda folder: ""), (good, 0.5))


@pytest.mark.parametrize("iterations", [5, 10])
def test_where_each_run_was_judged_is_printed_and_a_difference_of_the_controls_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, iterations: int
):
    """As with validations after each epoch and another batch size."""
    for name, rate in (("a", 0.1), ("c", 0.2)):
        write_run(tmp_path / name, [1.0, rate], rate=rate)

    def train(trials: Trials, folder: Path, words: Any) -> str:
        is_bad = folder.name == "bad"
        write_run(folder, [0.9, 2.0] if is_bad else [0.9, 0.5], iterations=iterations if is_bad else 5, epochs=2)
        return ""

    monkeypatch.setattr(Trials, "run", train)
    monkeypatch.chdir(tmp_path)
    assert main(["bisect", "a", "c", "--format", "json"]) == 0
    printed, errors = capsys.readouterr()
    found = json.loads(printed)
    assert [(each["settings"], each["iteration"]) for each in found["runs"]] == [
        ("none", 10), ("all 1", 2 * iterations)
    ]  # fmt: skip
    assert f"bad: 2 at iteration {2 * iterations}, worse  (all 1)" in errors
    warning = "c-bisect/good was judged at iteration 10, c-bisect/bad at 20: their lengths differ"
    assert (warning in errors) is (iterations == 10)
    assert main(["bisect", "a", "c"]) == 0
    assert f"c-bisect/bad   2         worse  {2 * iterations}         all 1\n" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity")])
def test_json_has_values_that_are_not_finite_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: float, text: str
):
    for name, rate in (("a", 0.1), ("c", 0.2)):
        write_run(tmp_path / name, [1.0, rate], rate=rate)

    def train(trials: Trials, folder: Path, words: Any) -> str:
        write_run(folder, [0.9, value if folder.name == "bad" else 0.5])
        return ""

    monkeypatch.setattr(Trials, "run", train)
    assert main(["bisect", str(tmp_path / "a"), str(tmp_path / "c"), "--format", "json"]) == 0
    runs = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["runs"]
    assert [each["value"] for each in runs] == [0.5, text]


def test_the_folder_of_a_run_that_is_named_by_dots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for name, rate in (("a", 0.1), ("c", 0.2)):
        write_run(tmp_path / name, [1.0, rate], rate=rate)
    monkeypatch.chdir(tmp_path / "c")
    wrong(capsys, "../a", ".")
    assert (tmp_path / "c-bisect").is_dir()


def test_modules_are_looked_up_in_the_checkout_where_they_are_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Such as those of the folder src of a project that is installed in editable mode."""
    repository, checkout, elsewhere = (tmp_path / name for name in ("repository", "checkout", "elsewhere"))
    for folder in (repository / "src", repository / ".venv", checkout / "src", checkout / "project", elsewhere):
        folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", ["", *map(str, (repository / "src", repository / ".venv", elsewhere))])
    found = _paths(repository, checkout, Path("project"))
    assert found == [checkout / "project", checkout, checkout / "src"]
