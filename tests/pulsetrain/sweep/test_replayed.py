"""Sweeps that recorded runs answer: the same results as those that train, from the logs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("optuna", reason="pip install 'pulsetrain[sweep]'")
pytest.importorskip("plotly", reason="pip install 'pulsetrain[sweep]'")

from pulsetrain.cli import main
from pulsetrain.configuration.parse import read_config
from pulsetrain.engine import Engine, Events
from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.events.payloads import PolicyUpdated, ValidationCompleted
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import EventRecorder
from pulsetrain.runs.archive import write_archive
from pulsetrain.sweep.replayed import recorded_runs, replayed_outcome
from pulsetrain.sweep.results import read_results
from pulsetrain.sweep.spec import Spec, read_spec
from tests.faults.sweeps import CONFIG, MODEL
from tests.pulsetrain.cli.test_cli_sweep import pulsetrain
from tests.pulsetrain.serve.test_sweeps import found_below
from tests.support.run_folders import content, write_run

Streams = pytest.CaptureFixture[str]
STOPPING = "{class_path: EarlyStopping, init_args: {metric: val/loss}}"
SWEEP = (
    "config: base.yaml\nfolder: out\nsampler: grid\nmetric: val/loss\n"
    "space: {handlers.EarlyStopping.patience: [1, 2, 3], handlers.EarlyStopping.min_delta: [0, 0.3]}\n"
)
FIRST = [1.0, 0.8, 0.9, 0.6, 0.7, 0.8, 0.5, 0.4]
SECOND = [1.0, 1.1, 0.9, 0.8, 0.9, 1.0, 1.1, 0.7]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.py").write_text(MODEL)
    (tmp_path / "base.yaml").write_text(CONFIG.replace("CSVLogger]", f"{STOPPING}]"))
    record(tmp_path, "a", FIRST)
    record(tmp_path, "b", SECOND)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(base: Path, name: str, losses: list[float], end: str = "completed", reason: str = "") -> None:
    """A run of base.yaml."""
    folder = write_run(base / "runs" / name, losses, end, reason=reason, epochs=8)
    configure(folder, read_config(base / "base.yaml", {}))


def configure(run: Path, config: dict[str, Any], **training: object) -> None:
    """Give a run that configuration, with other settings of its section `training`."""
    given = {**config, "run": str(run), "training": {**config["training"], **training}}
    (run / "config.yaml").write_text(yaml.safe_dump(given))


def sweep(text: str, *words: str) -> int:
    Path("s.yaml").write_text(text)
    return main(["sweep", "s.yaml", *words])


def test_a_replayed_sweep_leaves_what_a_trained_one_leaves(base: Path, capsys: Streams) -> None:
    before = content(base / "runs")
    assert sweep(SWEEP + "replay: runs/a\n") == 0
    said = capsys.readouterr()
    assert "answered from the logs of 1 run(s), without training" in said.err
    assert "trial 0 completed: val/loss 0.8, 15 iterations (handlers.EarlyStopping.patience 1, " in said.err
    assert (
        "best trial     4: replayed from runs/a\nconfiguration  out/best.yaml\npictures       out/sweep.html"
        in said.out
    )
    results = read_results(Path("out"))
    found = {(each.params["handlers.EarlyStopping.patience"], each.params["handlers.EarlyStopping.min_delta"]): each
             for each in results.trials}  # fmt: skip
    assert {key: (each.values["val/loss"], each.iterations) for key, each in found.items()} == {
        (1, 0): (0.8, 15), (2, 0): (0.6, 30), (3, 0): (0.4, 40),
        (1, 0.3): (0.8, 10), (2, 0.3): (0.8, 15), (3, 0.3): (0.5, 35),
    }  # fmt: skip
    best = read_config(Path("out/best.yaml"), {})
    assert best["handlers"][-1]["init_args"] == {"metric": "val/loss", "patience": 3, "min_delta": 0}
    page = Path("out/sweep.html").read_text()
    for title in ("History of val/loss", "Settings and val/loss", "Importance of the settings for val/loss"):
        assert title in page
    assert "<th>iterations</th>" in page
    assert content(base / "runs") == before
    assert sweep(SWEEP + "replay: runs/a\n") == 0  # nothing is left to do
    assert capsys.readouterr().out == said.out


def test_the_page_lists_a_replayed_sweep(base: Path) -> None:
    assert sweep(SWEEP + "replay: runs/a\n") == 0
    (found,) = found_below(base)
    assert (found["id"], found["best"]) == ("out", 4)
    trials = found["trials"]
    assert isinstance(trials, list)
    assert [each["iterations"] for each in trials][:2] == [40, 35]


def test_several_runs_give_means_and_ranges_can_be_searched(base: Path) -> None:
    text = SWEEP.replace("grid", "tpe\ntrials: 3").replace("[1, 2, 3]", "{low: 10, high: 1000}")
    text = text.replace("[0, 0.3]", "[0]")
    assert sweep(text + "replay: [runs/a, runs/b]\n") == 0
    trials = read_results(Path("out")).trials
    assert [each.state for each in trials] == ["completed"] * 3
    assert {(round(each.values["val/loss"], 6), each.iterations) for each in trials} == {(0.55, 80)}


def test_of_equal_trials_the_best_has_the_fewest_iterations(base: Path) -> None:
    record(base, "c", [0.5, *[1.0] * 7])
    assert sweep(SWEEP.replace("[1, 2, 3]", "[3, 1, 2]").replace("[0, 0.3]", "[0]") + "replay: runs/c\n") == 0
    best = read_results(Path("out")).best
    assert best is not None
    assert (best.number, best.iterations) == (1, 10)


def test_a_run_that_was_ended_earlier_does_not_answer(base: Path, capsys: Streams) -> None:
    record(base, "c", FIRST[:5], "terminate", "early stopping")
    assert sweep(SWEEP.replace("[0, 0.3]", "[0]") + "replay: runs/c\n") == 0
    first, *others = read_results(Path("out")).trials
    assert (first.state, first.iterations) == ("completed", 15)
    assert [each.state for each in others] == ["failed", "failed"]
    assert "runs/c: is stopped at iteration 25 (early stopping), and these values would not have ended it" in (
        others[0].error
    )


def test_an_argument_without_a_default_may_vary(base: Path) -> None:
    (base / "base.yaml").write_text(CONFIG.replace("CSVLogger", "StepLimit"))
    space = "space: {handlers.StepLimit.iterations: [15, 35]}"
    assert sweep(SWEEP[: SWEEP.index("space")] + space + "\nreplay: runs/a\n") == 0
    assert [(each.values["val/loss"], each.iterations) for each in read_results(Path("out")).trials] == [
        (0.8, 15), (0.6, 35),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("handlers.EarlyStopping.patience: [1, 2, 3]", "training.learning_rate: [1]"), "learning_rate changes"),
        (("EarlyStopping.patience: [1, 2, 3]", "Checkpointer.keep_last: [1, 2]"), "keep_last changes"),
        (("grid", "grid\npruner: median"), "pruner='median' acts on runs that train"),
        (("runs/a", "runs/none"), "runs/none: does not exist"),
        (("val/loss\nspace", "val/regret\nmode: min\nspace"), "val/regret"),
    ],
)  # fmt: skip
def test_a_sweep_that_logs_cannot_answer_is_refused(
    change: tuple[str, str], message: str, base: Path, capsys: Streams
) -> None:
    assert sweep((SWEEP + "replay: runs/a\n").replace(*change)) == 2
    assert message in capsys.readouterr().err
    assert not Path("out/best.yaml").exists()


def test_a_replayed_sweep_is_not_continued_by_training(base: Path, capsys: Streams) -> None:
    assert sweep(SWEEP + "replay: runs/a\n") == 0
    assert sweep(SWEEP + "replay: runs/a\n", "--train") == 2
    errors = capsys.readouterr().err
    assert "holds a sweep with other values of replay" in errors
    assert errors.endswith("only trials and workers may change; choose another folder\n")


def test_the_folder_of_a_sweep_by_a_wrong_metric_can_be_deleted(base: Path, capsys: Streams) -> None:
    assert sweep(SWEEP.replace("val/loss\n", "val/regret\nmode: min\n") + "replay: runs/a\n") == 2
    assert "val/regret" in capsys.readouterr().err
    assert sweep(SWEEP + "replay: runs/a\n") == 2
    assert "with other values of metric; " in (errors := capsys.readouterr().err)
    assert "choose another folder, or delete this one, in which no trial has completed, once no worker runs" in errors
    shutil.rmtree("out")
    assert sweep(SWEEP + "replay: runs/a\n") == 0


def test_a_sweep_whose_study_could_not_be_made_takes_the_corrected_file(
    base: Path, capsys: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg", reason="pip install 'pulsetrain[postgresql]'")
    right = SWEEP + "replay: runs/a\n"
    wrong = right.replace("grid", "{name: tpe, startup: 2}\ntrials: 1")
    assert sweep(wrong) == 2
    assert "unexpected keyword argument 'startup'" in capsys.readouterr().err
    assert sweep(right, "--worker", "0") == 2  # another worker may have read the file
    errors = capsys.readouterr().err
    assert "or delete this one, in which no trial has completed, once no worker runs there" in errors
    with monkeypatch.context() as patch:
        patch.setenv("PULSETRAIN_SWEEP_STORAGE", "postgresql://me@127.0.0.1:1/none")
        assert sweep(right) == 2
    assert "the PostgreSQL server cannot be read or written" in capsys.readouterr().err
    assert sweep(right) == 0
    assert sweep(wrong.replace("startup", "n_startup_trials")) == 2
    assert "holds a sweep with other values of sampler" in capsys.readouterr().err


def test_runs_of_the_same_configuration_are_named_where_they_could_answer(base: Path, capsys: Streams) -> None:
    config = read_config(Path("base.yaml"), {})
    stopping = {"class_path": "EarlyStopping", "init_args": {"metric": "val/loss", "patience": 9}}
    alike = {**config, "run": "runs/b", "handlers": [*config["handlers"][:-1], stopping]}
    (base / "runs" / "b" / "config.yaml").write_text(yaml.safe_dump(alike))
    other = {**config, "training": {**config["training"], "learning_rate": 1.0}}
    (base / "runs" / "a" / "config.yaml").write_text(yaml.safe_dump(other))
    (base / "out").mkdir()
    (base / "out" / "thesis.txt").write_text("so that nothing is trained")
    assert sweep(SWEEP) == 2
    assert "that without training; to use those of the same configuration, add to s.yaml:\n    replay: [runs/b]\n" in (
        capsys.readouterr().err
    )
    assert sweep(SWEEP, "--train") == 2
    assert "without training" not in capsys.readouterr().err
    Path("s.yaml").write_text(SWEEP.replace("EarlyStopping.min_delta: [0, 0.3]", "Checkpointer.keep_last: [1]"))
    assert recorded_runs(read_spec(Path("s.yaml"))) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": {"class_path": "tiny.net", "init_args": {"width": 8}}}, "model.init_args.width: 4 -> 8"),
        ({"training": {"learning_rate": 0.5}}, "training.learning_rate: 0.01 -> 0.5"),
        ({"training": {"max_epochs": 3}}, "training.max_epochs: 6 -> 3"),
    ],
)
def test_a_run_that_was_trained_otherwise_does_not_answer(
    base: Path, capsys: Streams, changed: dict[str, Any], message: str
) -> None:
    config = read_config(Path("base.yaml"), {})
    training = changed.pop("training", {})
    configure(base / "runs" / "b", {**config, **changed}, seed=4, **training)
    assert sweep(SWEEP + "replay: [runs/a, runs/b]\n") == 2
    errors = capsys.readouterr().err
    assert "replay: runs/b was not trained as " in errors
    assert f"base.yaml says, and cannot answer for it: {message} (configuration -> run); set " in errors
    assert not Path("out").exists()


def test_a_run_that_differs_in_other_settings_answers_with_a_note(base: Path, capsys: Streams) -> None:
    config = read_config(Path("base.yaml"), {})
    handlers = [each for each in config["handlers"] if each not in ("CSVLogger", config["handlers"][-1])]
    configure(base / "runs" / "a", {**config, "handlers": [*handlers, "Plots"]}, max_epochs=8, seed=4)
    (base / "runs" / "b" / "config.yaml").unlink()
    assert sweep(SWEEP + "replay: [runs/a, runs/b]\n") == 0
    errors = capsys.readouterr().err
    assert "note: runs/a differs from " in errors
    assert "training.max_epochs: 6 -> 8; training.seed: 3 -> 4; handlers.Plots: None -> " in errors
    assert "EarlyStopping:" not in errors
    assert "note: runs/b has no readable config.yaml: whether it was trained as " in errors


@pytest.mark.parametrize(
    ("length", "answer"),
    [(25, ("completed", 25, "")), (23, ("failed", None, "runs/a: was not validated at iteration 23, where a run of "))],
)
def test_a_longer_run_is_read_up_to_the_length_of_the_configuration(
    base: Path, length: int, answer: tuple[str, int | None, str]
) -> None:
    text = (base / "base.yaml").read_text().replace("max_epochs: 6", f"max_iterations: {length}")
    (base / "base.yaml").write_text(text)
    configure(base / "runs" / "a", read_config(base / "base.yaml", {}), max_iterations=40)
    assert sweep(SWEEP.replace("[0, 0.3]", "[0]") + "replay: runs/a\n") == 0
    first, _, third = read_results(Path("out")).trials
    assert (first.state, first.iterations, first.values) == ("completed", 15, {"val/loss": 0.8})
    assert (third.state, third.iterations) == answer[:2]
    assert answer[2] in third.error
    assert third.values.get("val/loss", 0.6) == 0.6  # of 0.4 after 40 iterations


@pytest.mark.parametrize(
    ("validated", "end", "answer"),
    [
        ((), 8, (8.0, 8)),
        ((), 10, (8.0, 10)),
        (range(4, 13, 4), 8, (8.0, 8)),
        (range(4, 13, 4), 10, "was not validated at iteration 10"),
    ],
)
def test_a_longer_run_with_rollouts_is_read_up_to_the_length_of_the_configuration(
    tmp_path: Path, validated: Sequence[int], end: int, answer: object
) -> None:
    engine = Engine(lambda engine, batch: {"loss": 1.0}, name="trainer")
    EventRecorder(tmp_path / "a", on_error="raise").attach(engine)

    @engine.on(Events.ITERATION_COMPLETED(every=4))
    def update(engine: Engine) -> None:
        at = float(engine.state.iteration)
        engine.fire(Events.POLICY_UPDATED, PolicyUpdated(metrics={"rollout/return": at}))
        if at in validated:
            engine.fire(Events.VALIDATION_COMPLETED, ValidationCompleted(metrics={"val/loss": at}, seconds=0.1))

    if validated:  # without the metric, and without a validation

        @engine.on(Events.ITERATION_COMPLETED(once=end))
        def update_again(engine: Engine) -> None:
            engine.fire(Events.POLICY_UPDATED, PolicyUpdated(metrics={"policy/kl": 0.1}))

    engine.run([0] * 12, max_epochs=1)
    base = {"training": {"max_iterations": end}, "handlers": []}
    spec = Spec("c.yaml", "out", {}, ("rollout/return",), ("max",), base=base, replay=(str(tmp_path / "a"),))
    if isinstance(answer, str):
        with pytest.raises(RecordingError, match=answer):
            replayed_outcome(spec, {})
    else:
        found = replayed_outcome(spec, {})
        assert (found.values[0], found.iteration) == answer


def test_a_run_whose_length_is_written_with_an_exponent_is_a_longer_one(base: Path, capsys: Streams) -> None:
    text = (base / "base.yaml").read_text().replace("max_epochs: 6", "max_iterations: 1e1")
    (base / "base.yaml").write_text(text)
    configure(base / "runs" / "a", read_config(base / "base.yaml", {}), max_iterations=40)
    assert sweep(SWEEP + "replay: runs/a\n") == 0
    assert "in training.max_iterations: 10.0 -> 40" in capsys.readouterr().err


def test_a_sweep_that_died_before_it_made_its_study_takes_the_corrected_file(base: Path, capsys: Streams) -> None:
    wrong = SWEEP.replace("grid", "{name: tpe, startup: 2}\ntrials: 1") + "replay: runs/a\n"
    assert sweep(wrong) == 2
    Path("out/sweep.sqlite").touch()
    assert sweep(SWEEP + "replay: runs/a\n", "--worker", "0") == 2
    assert "or delete this one, in which no trial has completed" in capsys.readouterr().err
    assert sweep(SWEEP + "replay: runs/a\n") == 0


def test_runs_of_the_configuration_answer_without_a_note(base: Path, capsys: Streams) -> None:
    assert sweep(SWEEP + "replay: [runs/a, runs/b]\n") == 0
    assert capsys.readouterr().err.count("note") == 1


@pytest.mark.parametrize(
    ("setting", "default"), [("accumulate", 1), ("precision", "fp32"), ("validate_every", {"epochs": 1})]
)
def test_a_default_that_only_the_run_gives_does_not_count(
    setting: str, default: object, base: Path, capsys: Streams
) -> None:
    config = read_config(Path("base.yaml"), {})
    assert setting not in config["training"]
    configure(base / "runs" / "a", config, **{setting: default})
    assert sweep(SWEEP + "replay: [runs/a]\n") == 0
    assert capsys.readouterr().err.count("note") == 1


@pytest.mark.parametrize(
    "other",
    [
        {"strategy": {"class_path": "supervised", "init_args": {"loss": "mse"}}},
        {"strategy": {"class_path": "pulsetrain.SupervisedStrategy", "init_args": {"loss": "mse"}}},
        {"data": {"class_path": "tiny.loaders", "init_args": None}},
        {"backend": "pulsetrain.engine.backends.TorchBackend"},
        {"handlers": [{"class_path": "pulsetrain.handlers.Checkpointer", "init_args": {"every": {"iterations": 7}}},
                      {"class_path": "EventRecorder"}]},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_another_spelling_of_the_same_class_does_not_count(base: Path, capsys: Streams, other: dict[str, Any]) -> None:
    configure(base / "runs" / "a", {**read_config(Path("base.yaml"), {}), **other})
    assert sweep(SWEEP + "replay: [runs/a]\n") == 0
    assert capsys.readouterr().err.count("note") == 1


def test_archives_answer_as_their_runs_do(base: Path, capsys: Streams) -> None:
    configure(base / "runs" / "b", read_config(Path("base.yaml"), {}), seed=7)
    assert sweep(SWEEP + "replay: [runs/a, runs/b]\n") == 0
    said = capsys.readouterr()
    for name in ("a", "b"):
        write_archive(Path("runs", name), Path(f"{name}.run.zip"))
    assert sweep(SWEEP.replace("folder: out", "folder: again") + "replay: [a.run.zip, b.run.zip]\n") == 0
    table, archived = said.out.partition("best trial")[0], capsys.readouterr()
    assert archived.out.startswith(table)
    assert "note: b.run.zip differs from " in archived.err
    Path("c.run.zip").write_bytes(b"PK")
    assert sweep(SWEEP.replace("folder: out", "folder: third") + "replay: c.run.zip\n") == 2
    assert "c.run.zip: is not a run's archive, or is damaged" in capsys.readouterr().err


def test_an_unknown_setting_is_refused_without_a_note_that_runs_could_answer(base: Path, capsys: Streams) -> None:
    for answers in ("", "replay: runs/a\n"):
        assert sweep(SWEEP.replace("EarlyStopping.min_delta", "EarlyStopping.min_delt") + answers) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("pulsetrain: error: space.handlers.EarlyStopping.min_delt: ")
        assert "note" not in errors


@pytest.mark.slow
def test_logs_give_the_values_that_training_gives_and_the_best_configuration_trains_to_them(base: Path) -> None:
    noisy = CONFIG.replace("CSVLogger", f"StepLimit, {STOPPING}").replace("1e-2, optimizer: sgd, seed: 3", "0.15")
    noisy = noisy.replace("StepLimit", "{class_path: StepLimit, init_args: {iterations: 1000}}")
    (base / "base.yaml").write_text(noisy)
    whole = pulsetrain("train", "base.yaml", "--run", "runs/whole", "--training.seed=7")
    assert whole.returncode == 0, whole.stderr
    (base / "base.yaml").write_text(noisy.replace("max_epochs: 6", "max_epochs: 4"))
    text = SWEEP.replace("EarlyStopping.min_delta: [0, 0.3]", "StepLimit.iterations: [15, 20, 35]")
    answers = []
    for folder, more in (("out", "replay: runs/whole\n"), ("trained", "seed: 7\n")):
        Path("s.yaml").write_text(text.replace("folder: out", f"folder: {folder}") + more)
        done = pulsetrain("sweep", "s.yaml")
        assert done.returncode == 0, done.stderr
        answers.append([dict(each.values) for each in read_results(Path(folder)).trials])
    assert answers[0] == answers[1]
    trained = pulsetrain("train", "out/best.yaml", "--run", "again")
    assert trained.returncode == 0, trained.stderr
    best = read_results(Path("out")).best
    assert best is not None
    losses = [each.payload["metrics"]["val/loss"] for each in EventLog("again").read(event="validation_completed")]  # type: ignore[index, call-overload]
    assert min(losses) == best.values["val/loss"]
