import math

import pytest
from structlog.testing import capture_logs

from pulsetrain.engine import Events, Every
from pulsetrain.engine.errors import ConfigurationError, MetricNotFoundError
from pulsetrain.handlers import BestModel, Checkpointer, EarlyStopping, ReduceLROnPlateau
from pulsetrain.handlers.metric_values.best_value import is_better
from tests.support.engines import make_engine, rolled_out, validate_each_epoch
from tests.support.models import loader, trainer

JUDGES = {
    "EarlyStopping": lambda folder, metric="val/los": EarlyStopping(metric, patience=50, mode="min"),
    "ReduceLROnPlateau": lambda folder, metric="val/los": ReduceLROnPlateau(metric, patience=50, mode="min"),
    "BestModel": lambda folder, metric="val/los": BestModel(metric, mode="min"),
    "Checkpointer": lambda folder, metric="val/los": Checkpointer(
        folder, metric=metric, mode="min", every=Every(epochs=50)
    ),
}


@pytest.mark.parametrize(
    ("value", "best", "mode", "better"),
    [
        (1.0, None, "min", True),
        (math.inf, None, "min", True),
        (math.nan, None, "min", False),
        (math.nan, 1.0, "min", False),
        (math.nan, 1.0, "max", False),
        (1.0, 2.0, "min", True),
        (1.0, 1.0, "min", False),
        (1.0, 1.0, "max", False),
        (1.0, 2.0, "max", False),
        (3.0, 2.0, "max", True),
        (1.0, math.inf, "min", True),
        (math.inf, math.inf, "min", False),
        (-math.inf, -math.inf, "min", False),
    ],
)
def test_a_value_is_better_when_it_is_past_the_best_and_nan_never_is(value, best, mode, better):
    assert is_better(value, best, mode) is better


def test_an_improvement_is_larger_than_min_delta():
    assert not is_better(1.5, 2.0, "min", min_delta=0.5)
    assert is_better(1.25, 2.0, "min", min_delta=0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: EarlyStopping("val/loss", patience=50),
        lambda folder: BestModel("val/loss", restore=False),
        lambda folder: Checkpointer(folder, metric="val/loss", every=Every(epochs=1)),
    ],
    ids=["EarlyStopping", "BestModel", "Checkpointer"],
)
def test_every_handler_that_keeps_a_best_value_ignores_nan_and_ties(make, tmp_path):
    losses = [math.nan, 2.0, math.nan, 2.0, 1.0]
    run = trainer({"max_epochs": 5, "validate_every": Every(epochs=99)}, val_loader=loader(8))
    validate_each_epoch(run, [{"val/loss": loss} for loss in losses])
    handler, best = make(tmp_path).attach(run), []
    run.on(Events.EPOCH_STARTED)(lambda: best.append(best_value(handler)))
    run.train()
    assert best == [None, None, 2.0, 2.0, 2.0]


def best_value(handler):
    if isinstance(handler, Checkpointer):
        return handler.best[0][0] if handler.best else None
    return handler.best_value


@pytest.mark.parametrize("name", JUDGES)
def test_a_metric_that_does_not_come_is_named_with_those_that_exist_at_the_end_of_the_first_validation(name, tmp_path):
    run = trainer({"max_epochs": 3}, val_loader=loader(8), handlers=[JUDGES[name](tmp_path)])
    with pytest.raises(MetricNotFoundError, match=rf"{name}\(metric='val/los'\).*there are: .*val/loss; did you mean"):
        run.train()
    assert (run.state.epoch, run.state.validation_round) == (1, 1)


@pytest.mark.parametrize("name", JUDGES)
def test_a_trainer_that_never_validates_is_refused(name, tmp_path):
    with pytest.raises(ConfigurationError, match=rf"{name}\(metric='val/los'\): waits for a validation"):
        trainer({"max_epochs": 3}, handlers=[JUDGES[name](tmp_path)])


@pytest.mark.parametrize("name", JUDGES)
def test_a_metric_of_training_is_answered_with_what_is_judged(name, tmp_path):
    with pytest.raises(ConfigurationError, match=r"pass val_loader=\{'train-eval': .* name 'train-eval/loss'$"):
        trainer({"max_epochs": 1}, handlers=[JUDGES[name](tmp_path, "train/loss")])
    message = r"only metrics of validations are judged; .*val_loader=\{'held-out': .* name 'train-eval/loss'; or call "
    with pytest.raises(MetricNotFoundError, match=message):
        trainer(val_loader={"held-out": loader(8)}, handlers=[JUDGES[name](tmp_path / "a", "train_loss")])


@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize("metric", ["val/loss", "val_loss", "loss", "mine"])
def test_a_metric_that_is_named_after_no_validation_set_is_refused_before_the_training(metric, name, tmp_path):
    message = rf"^{name}\(metric='{metric}'\): .* no validation set has this name; there are: dev, test; .* 'dev/loss';"
    with pytest.raises(MetricNotFoundError, match=message):
        trainer(val_loader={"dev": loader(8), "test": loader(8)}, handlers=[JUDGES[name](tmp_path, metric)])


@pytest.mark.parametrize("metric", ["dev/loss", "test_loss", "dev/logged/later", "rollout/return", "policy/kl"])
def test_a_metric_that_may_come_is_not_refused_before_the_training(metric):
    stopping = EarlyStopping(metric, mode="min")
    trainer(val_loader={"dev": loader(8), "test": loader(8)}, handlers=[stopping])


def test_the_training_data_and_logged_values_are_judged_as_the_error_says():
    sets = {"val": loader(8), "train-eval": loader(8)}
    on_data, on_logged = EarlyStopping("train-eval/loss"), EarlyStopping("val/train_loss")
    run = trainer({"max_epochs": 1}, val_loader=sets, handlers=[on_data, on_logged])
    run.on(Events.ITERATION_COMPLETED)(lambda engine: engine.log("val/train_loss", 2.0))
    metrics = run.train()
    assert (on_data.best_value, on_logged.best_value) == (metrics["train-eval/loss"][0], 2.0)


class Acting:
    """Data that a policy makes."""

    fires_rollouts = True

    def attach(self, run):
        pass

    def __iter__(self):
        return iter(loader(8))


JUDGE = {
    "EarlyStopping": EarlyStopping,
    "ReduceLROnPlateau": ReduceLROnPlateau,
    "BestModel": BestModel,
    "Checkpointer": lambda metric: Checkpointer("unused", metric=metric),
}


@pytest.mark.parametrize("name", JUDGE)
@pytest.mark.parametrize("metric", ["val/loss", "val_loss"])
def test_rollouts_report_no_metric_of_a_validation(name, metric, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"waits for a validation.*'rollout/return'"):
        trainer({"max_epochs": 3}, train_loader=Acting(), handlers=[JUDGE[name](metric)])


@pytest.mark.parametrize("name", JUDGE)
def test_a_trainer_with_rollouts_may_be_evaluated_by_them(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = trainer({"max_epochs": 3}, train_loader=Acting(), handlers=[JUDGE[name]("rollout/return")])
    assert run.hears(Events.ROLLOUT_COMPLETED)
    assert run.hears(Events.POLICY_UPDATED)


@pytest.mark.parametrize("name", JUDGES)
def test_a_metric_that_no_rollout_has_reported_is_said_at_the_end(name, tmp_path):
    run = trainer({"max_epochs": 1}, train_loader=Acting())
    JUDGES[name](tmp_path, "rollout/retrun").attach(run)
    run.on(Events.EPOCH_STARTED)(lambda: rolled_out(run, {"rollout/return": 1.0}))
    with capture_logs() as logs:
        run.train()
    said = [line for line in logs if line["event"].startswith(f"{name} has ")]
    assert len(said) == 1
    assert name == "BestModel" or "did you mean 'rollout/return'?" in said[0]["reason"]


def test_an_engine_of_ones_own_may_validate_by_itself():
    engine = make_engine()
    stopping = EarlyStopping(patience=1).attach(engine)
    validate_each_epoch(engine, [{"val/loss": 1.0}])
    engine.run([0], max_epochs=1)
    assert stopping.best_value == 1.0
