"""Population-based training: who is forked from whom, and with which settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pulsetrain.cli import main
from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.sweep.coordinator import _Coordinator
from pulsetrain.sweep.population import lineage_of, parent_of, values_of
from pulsetrain.sweep.spec import Range, Spec, read_spec
from pulsetrain.sweep.study import draw
from pulsetrain.sweep.trials import trial_folder
from tests.support.run_folders import write_run

SPEC = Spec(
    "c", "f", {"rate": Range(1e-3, 1.0, log=True)}, ("val/loss",), ("min",), "population", population=4, interval=5
)
KEY = "data.init_args.api_key"


def ended(number: int, value: float | None) -> Any:
    state = SimpleNamespace(name="COMPLETE" if value is not None else "FAIL")
    return SimpleNamespace(
        number=number, state=state, values=None if value is None else [value], params={"rate": 0.1 + number}
    )


FIRST = [ended(0, 0.5), ended(1, 0.1), ended(2, 0.9), ended(3, 0.4)]


def test_the_worst_quarter_is_replaced_by_forks_of_the_best() -> None:
    assert [parent_of(SPEC, number, FIRST) for number in range(4, 8)] == [0, 1, 1, 3]


def test_larger_values_can_be_better() -> None:
    spec = Spec("c", "f", SPEC.space, ("val/loss",), ("max",), "population", population=4, interval=5)
    assert [parent_of(spec, number, FIRST) for number in range(4, 8)] == [0, 2, 2, 3]


def test_a_failed_member_is_replaced() -> None:
    trials = [ended(0, None), *FIRST[1:]]
    assert parent_of(SPEC, 4, trials) == 1


def test_a_member_that_failed_is_not_forked() -> None:
    spec = replace(SPEC, population=8)
    trials = [ended(number, 0.5 if number == 3 else None) for number in range(8)]
    assert [parent_of(spec, number, trials) for number in range(8, 16)] == [3] * 8


def test_the_lineage_is_read_from_the_run_folders(tmp_path: Path) -> None:
    for name, parent in (("0001", None), ("0006", "0001"), ("0011", "0006")):
        (tmp_path / name).mkdir()
        entry = {} if parent is None else {"parent": {"run": f"/where/it/was/trained/{parent}"}}
        (tmp_path / name / "run.json").write_text(json.dumps(entry))
    assert lineage_of(tmp_path / "0011") == [1, 6, 11]


def test_others_keep_their_settings_and_the_replaced_are_perturbed_within_the_range() -> None:
    assert values_of(SPEC, 4, FIRST) == {"rate": 0.1}
    assert values_of(SPEC, 6, FIRST)["rate"] in (0.8 * 1.1, 1.0)  # 1.25 * 1.1 is above the range


def test_the_first_generation_follows_from_the_seed() -> None:
    drawn = [values_of(SPEC, number, [])["rate"] for number in range(4)]
    assert drawn == [values_of(SPEC, number, [])["rate"] for number in range(4)]
    assert len(set(drawn)) == 4
    assert all(1e-3 <= rate <= 1 for rate in drawn)


def test_steps_that_do_not_fill_the_range_stay_within_it() -> None:
    space = {"rate": Range(0.0, 1.0, step=0.6), "share": Range(0.0, 0.3, step=0.1), "width": Range(8, 34, step=10)}
    spec = replace(SPEC, space=space, population=200)
    drawn = [values_of(spec, number, []) for number in range(200)]
    assert {each["rate"] for each in drawn} == {0.0, 0.6}
    assert {each["share"] for each in drawn} == {0.0, 0.1, 0.2, 0.3}
    assert {each["width"] for each in drawn} == {8, 18, 28}


@pytest.mark.parametrize(
    ("values", "before", "expected"),
    [
        (Range(1, 8), 1, {1, 2}),
        (Range(1, 8), 2, {1, 3}),
        (Range(1, 8), 8, {6, 8}),
        (Range(-4, 4), 0, {-1, 1}),
        (Range(8, 38, step=10), 18, {8, 28}),
        (Range(0.0, 1.0, step=0.25), 0.5, {0.25, 0.75}),
        (Range(0.0, 1.0), 0.5, {0.4, 0.625}),
    ],
)
def test_a_perturbed_setting_moves_at_least_a_step(values: Range, before: float, expected: set[float]) -> None:
    spec = replace(SPEC, space={"n": values}, population=4)
    found = set()
    for seed in range(20):
        trials = [ended(number, value) for number, value in enumerate((0.5, 0.1, 0.9, 0.4))]
        for each in trials:
            each.params = {"n": before}
        found.add(values_of(replace(spec, seed=seed), 6, trials)["n"])
    assert found == expected


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A sweep's coordinator after the first generation, whose runs have written their logs and checkpoints."""
    pytest.importorskip("optuna", reason="optuna is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("base.yaml").write_text(
        "model: tiny.net\ndata: {class_path: tiny.loaders, init_args: {api_key: S3cr3tV4lue}}\n"
        "handlers: [EventRecorder, {class_path: WandbLogger, init_args: {api_key: S3cr3tV4lue}}]\n"
    )
    Path("s.yaml").write_text(
        "config: base.yaml\nfolder: out\nmetric: val/loss\nsampler: population\npopulation: 4\ngenerations: 2\n"
        "interval: 10\n"
        "space: {training.learning_rate: {low: 1e-3, high: 0.1}, training.accumulate: {low: 1, high: 8}}\n"
    )
    spec = read_spec(Path("s.yaml"))
    Path("out").mkdir()
    coordinator = _Coordinator(spec, main, lambda trial: None, None)
    for number, loss in enumerate((0.5, 0.1, 0.9, 0.4)):
        trial = coordinator.study.ask()
        params = draw(spec, coordinator.study, trial)
        coordinator.study.tell(trial, loss)
        write_run(trial_folder(spec, number), [1.0, loss], "terminate", rate=params["training.learning_rate"])
        (trial_folder(spec, number) / "checkpoints" / "000000010-end").mkdir(parents=True)
    return coordinator


def settings_in(words: Sequence[str]) -> dict[str, str]:
    return dict(each[2:].split("=", 1) for each in words if each.startswith("--") and "=" in each)


def test_a_member_is_given_only_the_settings_that_change(begun: Any) -> None:
    params = {number: begun._trials()[number].params for number in range(4)}
    own = begun._job(4, params[0])
    assert settings_in(own.fork).keys() == {"handlers", KEY}  # its rate, which a handler may have reduced, stays
    other = begun._job(6, {**params[1], "training.learning_rate": 0.05})
    assert settings_in(other.fork).keys() == {"training.learning_rate", "handlers", KEY}


def test_a_fork_trains_with_the_words_of_the_sweep(begun: Any) -> None:
    job = begun._job(4, begun._trials()[0].params)
    handlers = load_yaml(settings_in(job.train)["handlers"])
    assert settings_in(job.train) == settings_in(job.fork)
    assert settings_in(job.train)[KEY] == '"S3cr3tV4lue"'
    assert handlers[1]["init_args"] == {"api_key": "S3cr3tV4lue"}  # config.yaml has "[redacted]"
    assert handlers[2]["init_args"]["sweep"] == str(Path("out").resolve())  # config.yaml: where it was before


def test_a_member_whose_parent_lacks_the_last_checkpoint_fails(begun: Any) -> None:
    checkpoints = trial_folder(begun.spec, 0) / "checkpoints"
    (checkpoints / "000000010-end").rename(checkpoints / "000000007-a")
    begun._start(None)
    failed = begun._trials()[4]
    assert failed.state.name == "FAIL"
    assert "has no checkpoint of iteration 10" in failed.user_attrs["error"]
    assert "its last one is of iteration 7; leave at_end of Checkpointer true" in failed.user_attrs["error"]
    assert not begun._active
