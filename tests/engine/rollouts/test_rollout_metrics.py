"""A metric of rollouts that judges a run may be missing before the first rollout."""

import types

import pytest
from structlog.testing import capture_logs

from pulsetrain.engine import Events
from pulsetrain.engine.errors import MetricNotFoundError
from pulsetrain.handlers.metric_values.best_value import judged_name, warn_if_never_reported


def validated(rollouts, metrics):
    state = types.SimpleNamespace(rollout_round=0, metrics=metrics)
    engine = types.SimpleNamespace(state=state, train_loader=types.SimpleNamespace(fires_rollouts=rollouts), name="run")
    payload = types.SimpleNamespace(metrics=metrics)
    return engine, types.SimpleNamespace(type=Events.VALIDATION_COMPLETED.value, payload=payload)


def test_a_validation_before_the_first_rollout_need_not_report_one():
    metrics = {"val/loss": 1.0}
    assert judged_name("EarlyStopping", "rollout/return", *validated(True, metrics)) is None
    with pytest.raises(MetricNotFoundError, match="rollout/return"):
        judged_name("EarlyStopping", "rollout/return", *validated(False, metrics))


def test_a_run_without_rollouts_that_evaluated_nothing_ends_without_a_word():
    engine, _ = validated(False, {})
    with capture_logs() as logs:
        warn_if_never_reported("EarlyStopping", "val/loss", engine)
        engine.state.rollout_round = 1
        assert logs == []
        warn_if_never_reported("EarlyStopping", "val/loss", engine)
    assert [line["event"] for line in logs] == ["EarlyStopping has judged nothing"]
