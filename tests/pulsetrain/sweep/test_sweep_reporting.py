"""When the handler of a trial ends its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="pip install 'pulsetrain[sweep]'")

from pulsetrain.engine import Engine, Events, ValidationCompleted
from pulsetrain.sweep.reporting import SweepTrial
from pulsetrain.sweep.spec import Spec, write_saved
from pulsetrain.sweep.study import adopted, open_study

PRUNERS = {
    "median": {"n_startup_trials": 1},
    "asha": {"min_resource": 1, "reduction_factor": 2},
    "hyperband": {"max_resource": 2, "reduction_factor": 2},
}


class KilledError(Exception):
    """The end of a process, at a place that the test chooses."""


def killed(*_: object, **__: object) -> None:
    raise KilledError


def sweep_of(folder: Path, pruner: str, options: dict[str, Any] | None = None) -> Any:
    """A study in which four trials have ended with a loss of 0.1."""
    options = PRUNERS[pruner] if options is None else options
    spec = Spec(
        "c", str(folder), {"rate": (1, 2)}, ("val/loss",), ("min",), "grid", pruner=pruner, pruner_options=options
    )
    write_saved(spec)
    study = open_study(spec)
    (folder / "trials").mkdir()
    end_trials(study, 4, 0.1)
    return study


def end_trials(study: Any, count: int, loss: float) -> None:
    for _ in range(count):
        trial = study.ask()
        for step in (1, 2):
            trial.report(loss, step)
            trial.should_prune()
        study.tell(trial, loss)


class Process:
    """One that trains the trial, from its beginning or resumed after so many validations."""

    def __init__(self, folder: Path, number: int, reports: int = 0) -> None:
        self._engine = Engine(lambda _engine, _batch: None)
        self.handler = SweepTrial(str(folder), number).attach(self._engine)
        self.handler.load_state_dict({"trial": number, "reports": reports, "reason": ""})

    def validate(self, loss: float) -> str:
        """One validation; the reason if it ends the run."""
        self._engine.fire(Events.VALIDATION_COMPLETED, ValidationCompleted(metrics={"val/loss": loss}, seconds=0.0))
        return self.handler.reason


def test_a_resumed_trial_is_pruned_where_one_that_was_never_killed_is(tmp_path: Path) -> None:
    spec = Spec(
        "c", str(tmp_path), {"rate": (1, 2)}, ("val/loss",), ("min",), "grid", pruner="median",
        pruner_options={"n_startup_trials": 1, "n_warmup_steps": 0},
    )  # fmt: skip
    write_saved(spec)
    study = open_study(spec)
    (tmp_path / "trials").mkdir()
    first = study.ask()
    for step, value in enumerate([1.0, 0.9, 0.8, 0.1], 1):
        first.report(value, step)
    study.tell(first, 0.1)
    second = study.ask()
    for step, value in enumerate([0.7, 0.6, 0.5, 0.4], 1):  # killed while it judges the fourth
        second.report(value, step)

    resumed = Process(tmp_path, second.number, 2)
    assert resumed.validate(0.5) == ""
    assert resumed.validate(0.4) == "pruned by the sweep: val/loss after 4 validations, by median"


@pytest.mark.parametrize("pruner", PRUNERS)
def test_a_trial_killed_after_the_decision_and_before_a_checkpoint_is_pruned_when_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pruner: str
) -> None:
    study = sweep_of(tmp_path, pruner)
    number = study.ask().number
    process = Process(tmp_path, number)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "terminate", killed)
        with pytest.raises(KilledError):
            [process.validate(1.0) for _ in range(2)]
    reports, reason = process.handler.reports, process.handler.reason
    assert reason == f"pruned by the sweep: val/loss after {reports} validations, by {pruner}"
    end_trials(study, 5, 9.0)  # now the trial is among the best
    assert Process(tmp_path, number, reports - 1).validate(1.0) == reason


def test_a_trial_that_was_not_pruned_at_a_validation_is_not_pruned_there_when_it_resumes(tmp_path: Path) -> None:
    study = sweep_of(tmp_path, "median", {"n_startup_trials": 5})
    number = study.ask().number
    assert Process(tmp_path, number).validate(1.0) == ""  # too few trials to compare with
    end_trials(study, 1, 0.1)
    resumed = Process(tmp_path, number)
    assert resumed.validate(1.0) == ""
    assert resumed.validate(1.0) == "pruned by the sweep: val/loss after 2 validations, by median"


@pytest.mark.parametrize(
    "place",
    ["optuna.pruners._successive_halving._get_competing_values", "optuna.trial.Trial.set_user_attr",
     "pulsetrain.sweep.reporting._HeldBack.write"],
)  # fmt: skip
def test_a_trial_killed_while_asha_decides_does_not_pass_the_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    study = sweep_of(tmp_path, "asha")
    number = study.ask().number
    with monkeypatch.context() as patch:
        patch.setattr(place, killed)
        with pytest.raises(KilledError):
            Process(tmp_path, number).validate(1.0)
    assert Process(tmp_path, number).validate(1.0) == "pruned by the sweep: val/loss after 1 validations, by asha"
    stored = study._storage.get_trial(adopted(study, number)._trial_id)
    assert stored.system_attrs["completed_rung_0"] == 1.0  # what later trials are compared with
