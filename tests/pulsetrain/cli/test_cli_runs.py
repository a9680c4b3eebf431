"""`pulsetrain runs`, `tag` and `prune`."""

from __future__ import annotations

import csv
import gc
import io
import json
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.checkpoint import CheckpointManager, find_checkpoints
from tests.support.run_folders import BEGUN, SECOND, write_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    write_run(root / "a", [1.0, 0.5], rate=0.1)
    write_run(root / "b", [2.0, 0.25], "terminate", reason="early stopping: enough", rate=0.01)
    parent = {"run": str((root / "a").resolve()), "id": "a", "iteration": 5, "checkpoint": "000000005-x"}
    write_run(root / "more" / "c", [3.0], "exception_raised", reason="bad", rate=0.1, parent=parent)
    return root


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["runs", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_table_has_progress_best_metrics_and_what_differs(runs: Path, capsys: pytest.CaptureFixture[str]):
    head, *rows = listed(capsys)
    assert head.split() == [
        "run", "status", "progress", "val/loss", "val/accuracy", "training.learning_rate", "from", "updated"
    ]  # fmt: skip
    assert [row.split()[:2] for row in rows] == [["a", "completed"], ["b", "stopped"], ["more/c", "failed"]]
    assert "epoch 2/4 (50%)" in rows[0]
    assert " 0.25 " in rows[1]
    assert "a at 5" in rows[2]
    assert gc.isenabled()  # the command was in this process


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--where", 'best["val/loss"] < 0.4'], ["b"]),
        (["--where", "training.learning_rate > 0.05 and epoch == 2"], ["a"]),
        (["--where", 'status == "failed" or name == "a"'], ["a", "more/c"]),
        (["--status", "stopped,failed"], ["b", "more/c"]),
        (["--sort", "val/loss"], ["b", "a", "more/c"]),
        (["--sort", "val/loss", "--reverse", "--limit", "2"], ["more/c", "a"]),
    ],
)
def test_runs_are_selected_and_sorted(
    words: list[str], expected: list[str], runs: Path, capsys: pytest.CaptureFixture[str]
):
    assert [row.split()[0] for row in listed(capsys, *words)[1:]] == expected


def test_tags_are_added_shown_selected_by_and_removed(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["tag", str(runs / "a"), str(runs / "b"), "--add", "paper", "--add", "lr=3e-4"]) == 0
    assert main(["tag", str(runs / "b"), "--remove", "paper"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("b: lr=3e-4")
    assert [row.split()[0] for row in listed(capsys, "--tag", "paper")[1:]] == ["a"]
    assert main(["tag", str(runs), "--add", "x"]) == 2
    assert main(["tag", str(runs / "a"), "--add", "two words"]) == 2
    error = capsys.readouterr().err
    assert "is not a run folder" in error
    assert "tag(add='two words'): needs 1 to 64 letters" in error


def describe(run: Path, given: str, **settings: object) -> None:
    """Let the run have these settings, of which its config.yaml gives some."""
    described = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**described, "settings": settings}))
    (run / "config.yaml").write_text(given)


def test_settings_that_a_configuration_leaves_out_have_their_defaults(runs: Path, capsys: pytest.CaptureFixture[str]):
    every = {"epochs": 1, "updates": None}
    describe(runs / "a", "training: {accumulate: 2}", accumulate=2, warmup_steps=0, validate_every=every)
    given = "training: {warmup_steps: 0, validate_every: {epochs: 1}}"
    describe(runs / "b", given, accumulate=1, warmup_steps=0, validate_every=every)
    describe(runs / "more" / "c", "model: Net", accumulate=1, warmup_steps=0, validate_every=every, precision="fp32")
    for where, expected in {
        "training.accumulate == 1": ["b", "more/c"],
        "training.accumulate != 2": ["b", "more/c"],
        "training.warmup_steps == 0 and training.validate_every.epochs == 1": ["a", "b", "more/c"],
        'training.precision == "fp32"': ["more/c"],  # which no configuration gives
    }.items():
        assert [row.split()[0] for row in listed(capsys, "--where", where)[1:]] == expected
    assert [row.split()[0] for row in listed(capsys, "--sort", "training.accumulate")[1:]] == ["b", "more/c", "a"]
    rows = listed(capsys, "--columns", "training.precision,training.accumulate")
    assert [row.split() for row in rows[1:]] == [["2"], ["1"], ["fp32", "1"]]


def test_a_setting_given_with_its_default_does_not_differ(runs: Path, capsys: pytest.CaptureFixture[str]):
    describe(runs / "a", "training: {accumulate: 2, warmup_steps: 0}", accumulate=2, warmup_steps=0, precision="fp32")
    describe(runs / "b", "training: {}", accumulate=1, warmup_steps=0, precision="bf16")
    head, *rows = listed(capsys, "--where", "name in ['a', 'b']")
    assert [name for name in head.split() if name.startswith("training.")] == ["training.accumulate"]
    at = head.index("training.accumulate")
    assert [row[at:].split()[0] for row in rows] == ["2", "1"]


def test_json_and_csv(runs: Path, capsys: pytest.CaptureFixture[str]):
    rows = [json.loads(line) for line in listed(capsys, "--format", "json", "--columns", "run,val/loss,parent,from")]
    assert rows[1] == {"run": "b", "val/loss": 0.25, "parent": None, "from": ""}
    write_run(runs / "=1+1", [1.0])
    found = list(csv.reader(io.StringIO("\n".join(listed(capsys, "--format", "csv", "--columns", "run,status")))))
    assert found[:2] == [["run", "status"], ["'=1+1", "completed"]]


def test_hostile_names_do_not_move_the_cursor(runs: Path, capsys: pytest.CaptureFixture[str]):
    write_run(runs / "evil\x1b[2J\nname", [1.0])
    lines = listed(capsys)
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--where", "training.learning_rat > 1"],
            "no run has 'training.learning_rat'; did you mean 'training.learning_rate'?",
        ),
        (["--where", "lr > 1"], "no run has 'lr'; did you mean 'training.learning_rate'?"),
        (["--where", "val/loss < 1"], "no run has 'val'; a metric is written as best[\"val/loss\"]"),
        (["--where", "loss < 1"], "no run has 'loss'; a metric is written as best[\"val/loss\"]"),
        (["--where", "run == 'a'"], "no run has 'run'; did you mean 'name'?"),
        (["--where", "epochs > 1"], "no run has 'epochs'; did you mean 'epoch'?"),
        (["--sort", "lr"], "sort='lr'): no run has this column; the closest are training.learning_rate"),
        (["--where", "__import__('os')"], "not supported; a condition may use"),
        (
            ["--columns", "run,nonsense"],
            "columns='nonsense'): no run has this column; besides metrics",
        ),
        (["--sort", "val/los"], "sort='val/los'): no run has this column; the closest are val/loss"),
        (["--sort", "rate"], "sort='rate'): no run has this column; the closest are training.learning_rate"),
        (["--status", "runing"], "did you mean 'running'?"),
        (["missing"], "missing: does not exist; name a folder that holds runs"),
    ],
)
def test_wrong_input_is_answered_with_the_remedy(
    words: list[str], message: str, runs: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["runs", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_familiar_name_of_a_setting_is_answered_with_ours(runs: Path, capsys: pytest.CaptureFixture[str]):
    describe(runs / "a", "training: {learning_rate: 0.1}", learning_rate=0.1, seed=0)  # whose name is more alike
    assert main(["runs", "--where", "training.lr > 1"]) == 2
    assert "no run has 'training.lr'; did you mean 'training.learning_rate'?" in capsys.readouterr().err


def test_a_project_with_a_configuration_is_not_a_run(runs: Path, capsys: pytest.CaptureFixture[str]):
    (runs.parent / "config.yaml").write_text("model: {class_path: model.Net}\n")
    assert [row.split()[0] for row in listed(capsys, str(runs.parent))[1:]] == ["runs/a", "runs/b", "runs/more/c"]


def test_a_folder_without_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["runs", str(tmp_path)]) == 0
    assert "holds no runs" in capsys.readouterr().err


def checkpoints(run: Path) -> list[int]:
    return [int(each.name.split("-")[0]) for each in find_checkpoints(run / "checkpoints")]


def test_prune_shows_first_and_keeps_the_newest_the_best_and_what_forks_were_made_from(
    runs: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("a", "b"):
        manager = CheckpointManager(runs / name / "checkpoints", keep_last_n=100)
        for step in (5, 10, 15, 20, 25):
            manager.save({"step": step}, "x", is_best=step == 10, step=step)
    (runs / "b" / ".owner").write_text('{"pid": 1, "processes": ""}')
    assert main(["prune", str(runs)]) == 0
    output = capsys.readouterr().out
    assert "nothing was deleted: add --yes" in output
    assert "a: 2 checkpoints, 0.0 MB: 000000015-x, 000000020-x" in output
    assert checkpoints(runs / "a") == [5, 10, 15, 20, 25]
    assert main(["prune", str(runs), "--yes", "--where", 'name == "a"']) == 0
    assert "deleted 2 checkpoints" in capsys.readouterr().out
    assert checkpoints(runs / "a") == [5, 10, 25]
    assert checkpoints(runs / "b") == [5, 10, 15, 20, 25]
    assert main(["prune", str(runs), "--yes", "--keep-last", "0"]) == 2


def test_prune_keeps_what_forks_were_made_from_when_the_run_was_moved(runs: Path):
    manager = CheckpointManager(runs / "a" / "checkpoints", keep_last_n=100)
    for step in (5, 10, 15):
        manager.save({"step": step}, "x", step=step)
    (runs / "a").rename(runs / "moved")
    assert main(["prune", str(runs), "--yes"]) == 0
    assert checkpoints(runs / "moved") == [5, 15]


def test_prune_leaves_out_recent_runs_and_runs_in_progress(runs: Path, monkeypatch: pytest.MonkeyPatch):
    going = write_run(runs / "going", [1.0], None, closed=False)
    (going / ".owner").write_text('{"pid": 1, "processes": ""}')  # of another host, as far as is known
    for run in (going, runs / "a"):
        manager = CheckpointManager(run / "checkpoints", keep_last_n=100)
        for step in (1, 2):
            manager.save({}, "x", step=step)
    monkeypatch.setattr("time.time", lambda: BEGUN / SECOND + 40 * 86400)
    assert main(["prune", str(runs), "--yes", "--older-than", "41"]) == 0
    assert checkpoints(runs / "a") == [1, 2]
    assert main(["prune", str(runs), "--yes", "--older-than", "39"]) == 0
    assert (checkpoints(runs / "a"), checkpoints(going)) == ([2], [1, 2])


@pytest.mark.parametrize("days", ["-1", "nan"])
def test_prune_refuses_an_age_that_is_none(days: str, runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["prune", str(runs), "--yes", f"--older-than={days}"]) == 2
    assert f"--older-than {days}: needs days, 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ('best["val/los"] < 1', "no run has a best value of 'val/los'; did you mean 'val/loss'?"),
        ('epoch > 1 and last["xyz"] < 1', "no run has a newest value of 'xyz'; there are val/loss, val/accuracy"),
        ('status == "complted"', "no run has the status 'complted'; did you mean 'completed'?"),
        ('status != "x"', "no run has the status 'x'; choose one of running, completed"),
        ('status in ["failed", "runing"]', "no run has the status 'runing'; did you mean 'running'?"),
        ('tags == "good"', "tags is a list; write 'good' in tags"),
    ],
)
def test_a_condition_that_no_run_can_meet_is_refused(
    where: str, says: str, runs: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["runs", "--where", where]) == 2
    assert says in capsys.readouterr().err


def test_nothing_is_pruned_from_a_run_of_a_newer_version(runs: Path, capsys: pytest.CaptureFixture[str]):
    manager = CheckpointManager(runs / "a" / "checkpoints", keep_last_n=100)
    for step in (1, 2):
        manager.save({}, "x", step=step)
    (runs / "a" / "run.json").write_text('{"format": 99, "id": "a"}')
    assert main(["prune", str(runs), "--yes"]) == 0
    assert checkpoints(runs / "a") == [1, 2]


def test_prune_makes_no_folder(runs: Path):
    before = sorted(runs.rglob("*"))
    assert main(["prune", str(runs)]) == 0
    assert [each for each in sorted(runs.rglob("*")) if each not in before and each.name == "checkpoints"] == []


@pytest.mark.parametrize("asked", [[], ["--yes"]])
def test_prune_names_a_run_that_it_cannot_read_and_continues(
    asked: list[str], runs: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("a", "b"):
        manager = CheckpointManager(runs / name / "checkpoints", keep_last_n=100)
        for step in (1, 2):
            manager.save({}, "x", is_best=step == 1, step=step)
    for each in (runs / "a" / "checkpoints").glob("*best*"):
        each.write_text("damaged")
    manager.save({}, "x", step=3)
    assert main(["prune", str(runs), *asked]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"pulsetrain: error: {runs / 'a'}: ")
    assert output.err.count("error") == 1
    assert ("deleted 1 checkpoint" if asked else "would delete 1 checkpoint") in output.out
    assert (checkpoints(runs / "a"), checkpoints(runs / "b")) == ([1, 2], [1, 3] if asked else [1, 2, 3])
