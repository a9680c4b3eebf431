"""Without `mode`, a handler knows from the metric whether its values should fall or rise."""

from functools import partial

import pytest
import torchmetrics
from structlog.testing import capture_logs

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.metrics import infer_mode
from pulsetrain.handlers import BestModel, Checkpointer, EarlyStopping, ReduceLROnPlateau
from tests.support.models import loader, trainer

JUDGES = {
    "EarlyStopping": lambda folder, metric, **mode: EarlyStopping(metric, patience=50, **mode),
    "ReduceLROnPlateau": lambda folder, metric, **mode: ReduceLROnPlateau(metric, patience=0, factor=0.5, **mode),
    "BestModel": lambda folder, metric, **mode: BestModel(metric, **mode),
    "Checkpointer": lambda folder, metric, **mode: Checkpointer(folder, metric=metric, **mode),
}


class Score:
    """A metric with these values, one for each validation."""

    def __init__(self, higher_is_better, *values):
        self.higher_is_better, self.values = higher_is_better, iter(values)

    def reset(self): ...

    def update(self, y_pred, y): ...

    def compute(self):
        return next(self.values)


def judged(make, metric, object_says, **mode):
    """What a handler has kept after a run whose values rose and fell."""
    metrics = {metric.removeprefix("val/"): Score(object_says, 0.5, 0.75, 0.25, 0.25)}
    handler = make(metric, **mode)
    with capture_logs() as logs:
        run = trainer({"max_epochs": 4, "seed": 0}, val_loader=loader(8), metrics=metrics, handlers=[handler])
        run.train()
    kept = {name: value for name, value in handler.state_dict().items() if name != "weights"}
    weights = [each.tolist() for each in run.model.parameters()] if isinstance(handler, BestModel) else []
    said = [line for line in logs if line["event"].endswith("values are better")]
    return [kept, handler.mode, *weights], said


@pytest.mark.parametrize(
    ("metric", "object_says", "mode"),
    [
        ("val/mean_error", None, "min"),
        ("val/Accuracy", None, "max"),
        ("val/top5", True, "max"),
        ("val/score", False, "min"),
        ("val/accuracy_loss", True, "max"),
        ("val/accuracy", False, "min"),
    ],
)
@pytest.mark.parametrize("name", JUDGES)
def test_a_handler_ranks_by_what_the_metric_or_its_name_says(name, metric, object_says, mode, tmp_path):
    given, silent = judged(partial(JUDGES[name], tmp_path / "a"), metric, object_says, mode=mode)
    inferred, said = judged(partial(JUDGES[name], tmp_path / "b"), metric, object_says)
    assert inferred == given
    assert (len(said), len(silent)) == (1, 0)
    assert said[0]["log_level"] == "info"
    assert (said[0]["handler"], said[0]["metric"]) == (name, metric)
    assert said[0]["event"].startswith("larger" if mode == "max" else "smaller")


@pytest.mark.parametrize("metric", ["val/top5", "val/accuracy_loss", "val/neg_loss", "val/loss_reduction"])
@pytest.mark.parametrize("name", JUDGES)
def test_a_trainer_cannot_be_made_while_it_is_unknown_which_values_are_better(name, metric, tmp_path):
    def make(**mode):
        return trainer({}, val_loader=loader(8), handlers=[JUDGES[name](tmp_path, metric, **mode)])

    refusals = []
    for mode in ({}, {"mode": None}, {"mode": "max"}):
        try:
            make(**mode)
        except ConfigurationError as error:
            refusals.append(str(error))
    assert len(refusals) == 2
    for text in refusals:
        assert text.startswith(f"{name}(mode=None): ")
        assert f"metric={metric!r}" in text
        assert "pass mode='min' or mode='max'" in text


@pytest.mark.parametrize(("metric", "stops"), [("val/loss", False), ("val/accuracy", True)])
def test_a_handler_without_an_engine_goes_by_the_name(metric, stops):
    stopping = EarlyStopping(metric, patience=2)
    assert [stopping.step(value) for value in (3.0, 2.0, 1.0)] == [False, False, stops]
    plateau = ReduceLROnPlateau(metric, patience=1, optimizer=trainer({}).optimizer)
    assert [plateau.step(value) for value in (3.0, 2.0, 1.0)] == [False, False, stops]


def test_what_was_decided_is_said_once_for_each_handler():
    stopping = EarlyStopping("val/accuracy")
    with capture_logs() as logs:
        for _ in range(3):
            trainer({}, val_loader=loader(8), handlers=[stopping])
            stopping.detach()
    assert len(logs) == 1


def test_progress_of_a_plateau_is_loaded_whatever_the_direction():
    def plateau(**mode):
        return ReduceLROnPlateau("val/accuracy", patience=0, optimizer=trainer({}).optimizer, **mode)

    one, other = plateau(mode="max"), plateau()
    one.step(0.5)
    other.load_state_dict(one.state_dict())
    assert [other.step(value) for value in (0.75, 0.25)] == [False, True]


WORDS = ["neg", "negative", "minus", "inv", "inverse", "non", "not", "false", "drop", "gap", "delta", "diff", "ratio"]
WORDS += ["missed", "complement", "opposite", "violations", "time", "correction", "rejected"]


@pytest.mark.parametrize("word", [*WORDS, "scale", "weight", "coef"])
def test_a_word_that_changes_the_direction_of_another_leaves_it_unknown(word):
    names = [name for known in ("loss", "accuracy") for name in (f"val/{word}_{known}", f"val/{known}_{word}")]
    assert {name: infer_mode(name) for name in names} == dict.fromkeys(names)
    assert infer_mode("val/loss") == "min"
    assert infer_mode(f"{word}/accuracy") == "max"  # the name of a set


@pytest.mark.parametrize("separator", "/_")
def test_each_metric_of_a_collection_decides_for_itself(separator, tmp_path):
    members = {"near": torchmetrics.MeanAbsoluteError(), "explained": torchmetrics.R2Score()}
    scores = torchmetrics.MetricCollection(members)
    modes = {}
    for name in ("near", "explained"):
        handler = Checkpointer(tmp_path / name, metric=separator.join(("val", "scores", name)))
        run = trainer({"max_epochs": 1}, val_loader=loader(8), metrics={"scores": scores}, handlers=[handler])
        run.train()
        assert handler.best
        modes[name] = handler.mode
    assert modes == {"near": "min", "explained": "max"}
