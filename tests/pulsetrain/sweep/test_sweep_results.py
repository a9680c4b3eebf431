"""The results of a sweep, read from its storage."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="pip install 'pulsetrain[sweep]'")

from optuna.trial import TrialState

from pulsetrain.sweep.results import results_of
from pulsetrain.sweep.spec import Spec
from pulsetrain.sweep.study import adopted, open_study


def test_a_trial_that_completes_after_an_interrupted_failure_has_no_error(tmp_path: Path) -> None:
    spec = Spec("c", str(tmp_path), {"rate": (1, 2)}, ("val/loss",), ("min",), "grid")
    study = open_study(spec)
    study.ask().set_user_attr("error", "its process was killed 5 times")  # the coordinator is killed before the state
    study.tell(adopted(study, 0), 0.5)
    study.ask().set_user_attr("error", "no data")
    study.tell(adopted(study, 1), state=TrialState.FAIL)
    trials = results_of(tmp_path, spec.directions, study.get_trials(deepcopy=False)).trials
    assert [(each.state, each.error) for each in trials] == [("completed", ""), ("failed", "no data")]
