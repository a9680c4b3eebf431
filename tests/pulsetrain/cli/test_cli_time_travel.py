"""`pulsetrain verify` and `pulsetrain fork` on runs made from a configuration."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import yaml

from pulsetrain.cli import main
from pulsetrain.engine.recording import EventLog, diff

MODULE = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def data(batch_size: int = 4):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 4, generator=generator)
    rows = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return DataLoader(rows, batch_size=batch_size, shuffle=True), DataLoader(rows, batch_size=20)

def model(dropout: float = 0.1):
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
"""
CONFIG = {
    "model": "small_parts.model",
    "data": "small_parts.data",
    "strategy": {"class_path": "supervised", "init_args": {"loss": "mse"}},
    "training": {"max_epochs": 3, "seed": 3, "learning_rate": 0.01, "log_every_n_steps": 5, "device": "cpu"},
    "handlers": [
        "EventRecorder",
        {"class_path": "Checkpointer", "init_args": {"every": {"iterations": 8}, "keep_last": 20}},
        "CSVLogger",
        {"class_path": "Fingerprints", "init_args": {"every": {"updates": 1}, "batches": True}},
    ],
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "small_parts.py").write_text(MODULE)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    assert main(["train", str(folder / "config.yaml"), "--run", str(folder / "a")]) == 0
    return folder


@pytest.fixture
def workdir(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which contains the run "a"."""
    shutil.copytree(recorded / "a", tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_run_is_verified_from_its_own_configuration(workdir: Path, capsys: pytest.CaptureFixture[str]):
    before = {path: path.read_bytes() for path in (workdir / "a").rglob("*") if path.is_file()}
    assert main(["verify", "a"]) == 0
    assert "a, iterations 1 to 30: reproduced" in capsys.readouterr().out
    assert main(["verify", "a", "--from", "12", "--to", "20"]) == 0
    assert "a, iterations 9 to 20: reproduced" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in (workdir / "a").rglob("*") if path.is_file()} == before
    assert [path.name for path in workdir.iterdir()] == ["a"]


def test_a_changed_configuration_is_reported(workdir: Path, capsys: pytest.CaptureFixture[str]):
    config = yaml.safe_load((workdir / "a" / "config.yaml").read_text())
    config["training"]["learning_rate"] = 0.02
    (workdir / "a" / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["verify", "a"]) == 1
    output = capsys.readouterr().out
    assert "not reproduced" in output
    assert "likely cause: settings: learning_rate: 0.01 -> 0.02" in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "b"], "b: does not exist"),
        (["verify", "a", "--from", "3"], "has no checkpoint before iteration 3"),
        (["verify", "a", "--from", "0"], "at least 1"),
        (["verify", "a", "--training.seed", "4"], "--training.seed: verify has no such option"),
        (["fork", "a", "--at", "3", "--into", "b"], "has no checkpoint before iteration 4"),
        (["fork", "a", "--at", "9", "--into", "a/b"], "is inside the run"),
        (["fork", "a", "--at", "20", "--into", "b", "--skip-batches", "3-12"], "it has none of these"),
        (["fork", "a", "--at", "20", "--into", "b", "--skip-batches", "300"], "it has none of these"),
        (["fork", "a", "--at", "9", "--into", "a"], "already holds a run"),
        (["fork", "a", "--at", "0", "--into", "b"], "--at 0"),
        (["fork", "a", "--at", "9", "--into", "b", "--set", "training.learning_rate"], "is not KEY=VALUE"),
        (["fork", "a", "--at", "9", "--into", "b", "--set", "training.speed=3"], "training.speed"),
        (["fork", "a", "--at", "9", "--into", "b", "--set", "training.seed=3"], "cannot be changed in a fork"),
        (["fork", "a", "--at", "9", "--into", "b", "--skip-batches", "12-9"], "--skip-batches 12-9"),
        (["fork", "a", "--at", "9", "--into", "b", "--set", "model.class_path=small_parts.gone"], "small_parts"),
        (["fork", "a", "--at", "9", "--into", "b", "--set", "handlers=[EventRecorder]"], "Checkpointer"),
    ],
)
def test_wrong_input_is_reported_without_a_traceback_and_leaves_nothing(
    workdir: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(words) == 2
    output = capsys.readouterr().err
    assert said in output, output
    assert "Traceback" not in output
    assert [path.name for path in workdir.iterdir()] == ["a"]


def test_a_run_made_in_python_is_rejected_with_the_alternative(workdir: Path, capsys: pytest.CaptureFixture[str]):
    (workdir / "a" / "config.yaml").unlink()
    assert main(["verify", "a"]) == 2
    assert "pulsetrain.verify(run, build_trainer)" in capsys.readouterr().err


def test_a_run_that_cannot_be_forked_is_refused_before_its_checkpoints_are_looked_at(
    workdir: Path, capsys: pytest.CaptureFixture[str]
):
    (workdir / "a" / "config.yaml").unlink()
    for words in (["--at", "2"], ["--at", "20"], ["--at", "2", "--launch.nproc=2"]):
        assert main(["fork", "a", "--into", "b", *words]) == 2
        said = capsys.readouterr().err
        assert "a: has no config.yaml, so the command line cannot make its trainer" in said
        assert "a new Trainer with another run folder continues" in said
    assert main(["fork", "nowhere", "--at", "2", "--into", "b"]) == 2
    assert "nowhere: does not exist; name a run folder" in capsys.readouterr().err
    assert not Path("b").exists()


def test_a_fork_without_a_change_is_the_same_run(workdir: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["fork", "a", "--at", "20", "--into", "b", "--train"]) == 0
    found = diff("a", "b")
    assert not found, str(found)
    assert "b was forked from a after iteration 16: compared from there on" in str(found)
    assert found.agreed > 14 * 5
    parent = json.loads((workdir / "b" / "run.json").read_text())["parent"]
    assert (parent["iteration"], parent["changed"]) == (16, [])


def test_a_fork_that_nobody_has_trained_says_so_in_the_list(workdir: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["fork", "a", "--at", "20", "--into", "b"]) == 0
    assert main(["fork", "a", "--at", "20", "--into", "c", "--train"]) == 0
    for each in "bc":
        (workdir / each / ".owner").unlink(missing_ok=True)  # as when this process has ended
    capsys.readouterr()
    assert main(["runs", ".", "--columns", "run,reason", "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["a,", 'b,"forked, not trained yet"', "c,"]


def test_a_fork_of_a_run_whose_handler_cannot_be_detached(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(workdir)
    (workdir / "without_detach.py").write_text("class Plain:\n    def attach(self, engine):\n        pass\n")
    config = workdir / "a" / "config.yaml"
    config.write_text(config.read_text().replace("handlers:\n", "handlers:\n- without_detach.Plain\n"))
    assert main(["fork", "a", "--at", "20", "--into", "b"]) == 0, capsys.readouterr().err


def test_credentials_are_given_again_to_a_fork_and_the_command_that_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    guarded = "def guarded(api_key: str):\n    assert api_key == 'S3cr3tV4lue', 'no access'\n    return data()\n"
    Path("guarded_parts.py").write_text(MODULE + guarded)
    data = {"class_path": "guarded_parts.guarded", "init_args": {"api_key": "S3cr3tV4lue"}}
    config = {**CONFIG, "model": "guarded_parts.model", "data": data}
    config["training"] = {**CONFIG["training"], "max_epochs": 2}  # type: ignore[dict-item]
    Path("config.yaml").write_text(yaml.safe_dump(config))
    again = "--data.init_args.api_key=S3cr3tV4lue"
    assert main(["train", "config.yaml", "--run", "a"]) == 0
    assert "S3cr3tV4lue" not in Path("a/config.yaml").read_text()

    assert main(["train", "a/config.yaml", "--run", "copy"]) == 2
    assert "data.init_args.api_key: a credential is [redacted] in this configuration" in capsys.readouterr().err
    assert not Path("copy").exists()
    assert main(["train", "a/config.yaml", "--run", "copy", again]) == 0

    assert main(["fork", "a", "--at", "16", "--into", "b"]) == 2
    assert "`pulsetrain fork` takes --data.init_args.api_key=VALUE" in capsys.readouterr().err
    assert main(["fork", "a", "--at", "16", "--into", "b", again, "--training.learning_rate=0.02"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(
        "train it: pulsetrain train b/config.yaml --run b --resume latest --data.init_args.api_key=VALUE\n"
    )
    assert "S3cr3tV4lue" not in printed
    assert main(["fork", "a", "--at", "16", "--into", "c", again, "--train"]) == 0
    assert "S3cr3tV4lue" not in Path("c/config.yaml").read_text()
    assert max(each.iteration for each in EventLog("c").read(event="iteration_completed")) == 20


@pytest.mark.parametrize("name", ["best", "latest", "000000008-checkpoint"])
@pytest.mark.parametrize("command", [["verify", "--to", "2"], ["fork", "--at", "20", "--into", "b"]])
def test_a_checkpoint_of_the_run_names_the_run(
    command: list[str], name: str, workdir: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([command[0], f"a/checkpoints/{name}", *command[1:]]) == 0
    assert (
        "a, iterations 1 to 2: reproduced" in (said := capsys.readouterr().out) or "after iteration 16 of a\n" in said
    )
    (workdir / "checkpoints").mkdir()
    (workdir / "a").rename(workdir / "checkpoints" / "best_run")  # a run, not a checkpoint
    assert main(["verify", "checkpoints/best_run", "--to", "2"]) == 0


def test_a_fork_leaves_batches_out_and_changes_the_rate(workdir: Path, capsys: pytest.CaptureFixture[str]):
    words = ["fork", "a", "--at", "16", "--into", "b", "--skip-batches", "18-19"]
    assert main([*words, "--set", "training.learning_rate=0.02"]) == 0
    output = capsys.readouterr().out
    assert "starts      after iteration 16 of a" in output
    assert "training.learning_rate: 0.01 -> 0.02" in output
    assert "training.skip_batches: None -> [[18, 19]]" in output
    command = next(line for line in output.splitlines() if line.startswith("train it: pulsetrain "))
    assert main(command.removeprefix("train it: pulsetrain ").split()) == 0

    def batches(run: str) -> list[int]:
        return [event.payload["batch"] for event in EventLog(run).read(event="batch_fingerprinted")]

    parents, childs = batches("a")[16:], batches("b")
    assert childs[:8] == [parents[0], *parents[3:10]]  # to the end of the epoch and into the next pass
    rates = {rate for event in EventLog("b").read(engine="trainer", event="iteration_completed") for rate in event.lr}
    assert rates == {0.02}
    assert "learning_rates" in str(diff("a", "b"))


@pytest.mark.slow
def test_a_fork_that_leaves_batches_out_resumes_bit_for_bit(workdir: Path):
    assert main(["fork", "a", "--at", "8", "--into", "b", "--skip-batches", "12-13", "--train"]) == 0
    shutil.copytree("b", "c")
    for checkpoint in Path("c/checkpoints").iterdir():
        if checkpoint.is_dir() and checkpoint.name[:9] > "000000016":
            shutil.rmtree(checkpoint)
    assert main(["train", "c/config.yaml", "--run", "c", "--resume", "latest"]) == 0
    assert not diff("b", "c")


@pytest.mark.slow
def test_a_schedule_continues_at_its_step_with_the_new_rate(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copy(recorded / "small_parts.py", tmp_path)
    training = {**CONFIG["training"], "schedule": "cosine", "optimizer": "sgd"}  # type: ignore[dict-item]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "training": training}))
    assert main(["train", "config.yaml", "--run", "a"]) == 0
    assert main(["fork", "a", "--at", "16", "--into", "b", "--training.learning_rate", "0.02", "--train"]) == 0

    def rates(run: str) -> dict[int, float]:
        events = EventLog(run).read(engine="trainer", event="iteration_completed")
        return {event.iteration: event.lr[0] for event in events}

    before, after = rates("a"), rates("b")
    assert sorted(after) == list(range(17, 31))
    assert after == {iteration: pytest.approx(2 * before[iteration]) for iteration in after}


def test_the_computation_is_stepped_through_from_the_command_line(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lines = b"where\nbackward\nprint model[0].weight.grad.shape\nback to iteration_started\nstate\nquit\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert main(["debug", "a", "--live", "--at", "12"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("live: trainer's ")
    assert "iteration 12" in output
    assert "torch.Size([8, 4])" in output
    assert main(["debug", "a", "--at", "12"]) == 2
    assert "needs --live" in capsys.readouterr().err


def fingerprints(run: str) -> list[int]:
    return [event.payload["batch"] for event in EventLog(run).read(event="batch_fingerprinted")]


def test_a_whole_pass_can_be_left_out(workdir: Path):
    assert main(["fork", "a", "--at", "8", "--into", "b", "--skip-batches", "10-22", "--train"]) == 0
    found = fingerprints("b")
    assert len(found) == 22
    assert found[:9] == [fingerprints("a")[8], *fingerprints("a")[22:30]]


@pytest.mark.slow
def test_a_fork_of_a_fork_counts_as_the_fork_does(workdir: Path):
    assert main(["fork", "a", "--at", "8", "--into", "b", "--skip-batches", "12-13", "--train"]) == 0
    assert main(["fork", "b", "--at", "16", "--into", "c", "--skip-batches", "18", "--train"]) == 0
    older, newer = fingerprints("b")[8:], fingerprints("c")  # both after iteration 16
    assert newer[0] == older[0]
    assert newer[1] == older[2]  # the fork has no 18th
    config = yaml.safe_load((workdir / "c" / "config.yaml").read_text())
    assert config["training"]["skip_batches"] == [[12, 13], [20, 20]]
