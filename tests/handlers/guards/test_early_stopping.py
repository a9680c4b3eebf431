import math

import pytest
from ignite.handlers import EarlyStopping as IgniteEarlyStopping
from structlog.testing import capture_logs

from pulsetrain.engine.errors import ConfigurationError, MetricNotFoundError
from pulsetrain.handlers import EarlyStopping
from tests.support.engines import (
    make_engine,
    policy_updated,
    roll_out_before_each_batch,
    rolled_out,
    validate_each_epoch,
    validated,
)
from tests.support.models import loader, trainer

NAN = math.nan


def stops_after(stopping, values, engine=None):
    """The epoch after which a run with these validation losses ends."""
    engine = engine or make_engine()
    stopping.attach(engine)
    validate_each_epoch(engine, [{"val/loss": value} for value in values])
    engine.run([0], max_epochs=len(values))
    return engine


def test_stops_when_patience_validations_brought_no_improvement():
    engine = stops_after(EarlyStopping(patience=2), [3.0, 1.23, 2.0, 1.5, 1.0, 1.0])
    assert engine.state.epoch == 4
    assert engine.state.stop_reason == "early stopping: val/loss has not improved on 1.23 for 2 validations"


def test_an_improvement_starts_the_count_again():
    assert stops_after(EarlyStopping(patience=2), [3.0, 4.0, 2.0, 4.0, 1.0, 4.0]).state.stop_reason is None


def test_an_equal_value_is_not_an_improvement():
    assert stops_after(EarlyStopping(patience=2), [1.0, 1.0, 1.0, 0.0]).state.epoch == 3


def test_max_mode_takes_larger_for_better():
    stopping = EarlyStopping(patience=1, mode="max")
    assert [stopping.step(value) for value in (0.1, 0.2, 0.2)] == [False, False, True]
    assert stopping.best_value == 0.2


def test_an_improvement_needs_to_be_larger_than_min_delta():
    stopping = EarlyStopping(patience=2, min_delta=0.5)
    assert [stopping.step(value) for value in (2.0, 1.5, 1.25)] == [False, False, False]
    assert stopping.best_value == 1.25


def test_nan_is_not_an_improvement_unlike_in_ignite():
    scores = [1.0, NAN, 2.0, NAN, NAN]
    trainer = make_engine()
    remaining = iter(scores)
    theirs = IgniteEarlyStopping(patience=2, score_function=lambda engine: next(remaining), trainer=trainer)
    for _ in scores:
        theirs(trainer)
    assert not trainer.should_terminate

    ours = EarlyStopping(patience=2, mode="max")
    assert [ours.step(score) for score in scores] == [False, False, False, False, True]
    assert ours.best_value == 2.0


def test_a_run_of_nothing_but_nan_stops_and_says_so():
    engine = stops_after(EarlyStopping(patience=3), [NAN] * 5)
    assert engine.state.epoch == 3
    assert engine.state.stop_reason == "early stopping: val/loss has been NaN for 3 validations"


def test_infinity_is_worse_than_any_number_but_better_than_nothing():
    stopping = EarlyStopping(patience=5)
    stopping.step(math.inf)
    assert stopping.best_value == math.inf
    stopping.step(7.0)
    assert (stopping.best_value, stopping.is_best, stopping.counter) == (7.0, True, 0)


def test_underscore_names_are_accepted():
    assert stops_after(EarlyStopping(metric="val_loss", patience=1), [1.0, 2.0, 3.0]).state.epoch == 2


def test_a_missing_metric_ends_the_first_validation_with_those_that_exist():
    engine = make_engine()
    EarlyStopping(metric="val/los", mode="min").attach(engine)
    validate_each_epoch(engine, [{"val/loss": 1.0, "val/accuracy": 0.5}] * 3)
    with pytest.raises(
        MetricNotFoundError, match=r"EarlyStopping\(metric='val/los'\).*val/accuracy, val/loss.*did you"
    ):
        engine.run([0], max_epochs=3)
    assert engine.state.epoch == 1


def test_rollouts_are_evaluated_and_those_without_the_metric_are_skipped():
    engine = make_engine()
    EarlyStopping("rollout/return", patience=2, mode="max").attach(engine)
    reported = [{}, {"rollout/return": 3.0}, {"rollout/length": 9.0}, {"rollout/return": 2.0}, {"rollout/return": 1.0}]
    roll_out_before_each_batch(engine, [*reported, {"rollout/return": 9.0}])
    engine.run([0], max_epochs=6)
    assert (engine.state.rollout_round, engine.state.iteration) == (5, 4)
    assert engine.state.stop_reason == "early stopping: rollout/return has not improved on 3 for 2 rollouts"


def test_metrics_of_policy_updates_are_evaluated():
    engine, stopping = make_engine(), EarlyStopping("policy_kl", patience=9)
    stopping.attach(engine)
    for value in (0.5, 0.25, 0.75):
        policy_updated(engine, {"policy/kl": value})
    assert (stopping.best_value, stopping.counter) == (0.25, 1)


def test_a_metric_that_no_rollout_has_reported_is_named_at_the_end():
    engine = make_engine()
    EarlyStopping("rollout/retrun", mode="max").attach(engine)
    roll_out_before_each_batch(engine, [{"rollout/return": 1.0}] * 2)
    with capture_logs() as logs:
        engine.run([0], max_epochs=2)
    (line,) = logs
    assert line["event"] == "EarlyStopping has judged nothing"
    assert "did you mean 'rollout/return'?" in line["reason"]


def test_a_validation_may_lack_rollout_metrics_but_not_its_own():
    engine, stopping = make_engine(), EarlyStopping("rollout/return", mode="max")
    stopping.attach(engine)
    rolled_out(engine, {"rollout/return": 1.0})
    validated(engine, {"val/loss": 2.0})
    assert (stopping.best_value, stopping.counter) == (1.0, 0)
    EarlyStopping("val_los", mode="min").attach(engine)
    with pytest.raises(MetricNotFoundError, match=r"EarlyStopping\(metric='val_los'\)"):
        validated(engine, {"val/loss": 2.0})


def test_a_manual_loop_can_step_it():
    stopping, losses, best = EarlyStopping(patience=2), iter([3.0, 2.0, NAN, 2.5, 1.0]), []
    for loss in losses:
        stop = stopping.step(loss)
        if stopping.is_best:
            best.append(loss)
        if stop:
            break
    assert list(losses) == [1.0]
    assert best == [3.0, 2.0]
    assert (stopping.best_value, stopping.counter, stopping.is_best) == (2.0, 2, False)


def test_a_restored_count_continues():
    first, second = EarlyStopping(patience=3), EarlyStopping(patience=3)
    for value in (1.0, 2.0, 2.0):
        first.step(value)
    second.load_state_dict(first.state_dict())
    assert (second.best_value, second.counter, second.is_best) == (1.0, 2, False)
    assert second.step(2.0)


def test_the_state_holds_no_configuration():
    strict, lenient = EarlyStopping(patience=1), EarlyStopping(patience=9, mode="max")
    strict.step(1.0)
    lenient.load_state_dict(strict.state_dict())
    assert (lenient.patience, lenient.mode) == (9, "max")


def test_reset_forgets_what_was_seen():
    stopping = EarlyStopping(patience=1)
    stopping.step(1.0)
    stopping.step(2.0)
    stopping.reset()
    assert stopping.state_dict() == EarlyStopping().state_dict()


def test_attached_to_a_trainer_that_never_validates_it_says_so():
    with pytest.raises(ConfigurationError, match=r"EarlyStopping\(metric='val/loss'\): waits for a validation"):
        EarlyStopping().attach(trainer({"max_epochs": 1}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, r"EarlyStopping\(patience=0\): needs"),
        ({"patience": 2.5}, r"EarlyStopping\(patience=2.5\): needs"),
        ({"patience": True}, r"EarlyStopping\(patience=True\): needs"),
        ({"mode": "minimum"}, r"EarlyStopping\(mode='minimum'\): unknown; choose one of max, min"),
        ({"min_delta": -1.0}, r"EarlyStopping\(min_delta=-1.0\): needs"),
        ({"min_delta": NAN}, r"EarlyStopping\(min_delta=nan\): needs"),
        ({"metric": ""}, r"EarlyStopping\(metric=''\): needs"),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments, message):
    with pytest.raises(ValueError, match=message):
        EarlyStopping(**arguments)


def test_a_logged_value_without_the_name_of_a_validation_set_says_how_it_is_judged():
    message = r"a value of trainer\.log is judged with each validation if it is logged as 'held-out/\.\.\.'$"
    with pytest.raises(MetricNotFoundError, match=message):
        trainer(val_loader={"held-out": loader()}, handlers=[EarlyStopping("mine", mode="max")])
