"""What the trainer refuses, and what it says: one clear error at the earliest moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from engine import ConfigurationError, MetricNotFoundError, SupervisedStrategy
from engine.schedules import Constant
from handlers import Callback, ConsoleLogger, EarlyStopping, LRScheduler
from tests.pulsetrain.small import loader, regression_model, trainer


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"strategy": "supervized"}, ConfigurationError, "did you mean 'supervised'"),
        ({"strategy": SupervisedStrategy}, TypeError, "prepare_batch"),
        ({"train_loader": 7}, TypeError, "iterable of batches"),
        ({"val_loader": iter([1])}, ConfigurationError, "read once"),
        ({"handlers": [print]}, TypeError, "attach"),
        ({"handlers": [EarlyStopping()]}, ConfigurationError, "no val_loader"),
        ({"metrics": {"m": 3}}, ConfigurationError, "reset"),
        ({"optimizer": "adamx"}, ConfigurationError, "did you mean 'adam'"),
        ({"config": {"device": "cuda:9"}}, ConfigurationError, "not on this machine"),
        ({"config": {"device": "gpu"}}, ConfigurationError, "device='gpu'"),
        ({"config": {"schedule": "cosin"}}, ConfigurationError, "did you mean 'cosine'"),
        ({"config": {"max_tokens": 10}}, ConfigurationError, "counts no tokens"),
    ],
)
def test_a_wrong_argument_is_one_clear_error_at_once(arguments: dict[str, Any], error: type, says: str):
    with pytest.raises(error, match=says):
        trainer(**arguments)


def test_two_schedules_are_refused():
    with pytest.raises(ConfigurationError, match="give one"):
        trainer({"schedule": "linear"}, handlers=[LRScheduler(Constant(0.1))])


def test_a_loss_that_cannot_take_the_output_says_both_shapes():
    run = trainer(strategy=SupervisedStrategy("cross_entropy"))
    with pytest.raises((ValueError, TypeError)) as caught:
        run.train()
    text = str(caught.value) + " ".join(caught.value.__notes__)
    assert "float32 (4, 1)" in text
    assert "SupervisedStrategy(loss='cross_entropy')" in text


def test_a_batch_that_is_no_pair_says_what_is_needed():
    with pytest.raises(TypeError, match="pairs"):
        trainer(train_loader=DataLoader(torch.zeros(8, 4), batch_size=2)).train()


def test_a_metric_that_never_comes_is_named_at_the_first_validation():
    run = trainer(val_loader=loader(8), handlers=[EarlyStopping(metric="val/acuracy")])
    with pytest.raises(MetricNotFoundError, match="val/loss"):
        run.train()
    assert run.state.epoch == 1


def test_an_empty_loader_is_an_error():
    with pytest.raises(ConfigurationError, match="no batches"):
        trainer(train_loader=[])
    with pytest.raises(ValueError, match="gave no batch"):
        trainer(train_loader=iter([])).train()


def test_a_frozen_model_is_refused_before_the_first_step():
    model = regression_model().requires_grad_(False)
    with pytest.raises(ConfigurationError):
        trainer(model=model)


def test_a_loss_without_a_gradient_says_so():
    run = trainer(strategy=SupervisedStrategy(lambda outputs, targets: targets.sum()))
    with pytest.raises(RuntimeError, match="no gradient"):
        run.train()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"metrics": [1]}, "needs a mapping"),
        ({"metrics": {"a": ConsoleLogger}}, r"needs an object, as ConsoleLogger\(\)"),
        ({"callbacks": Callback()}, r"callbacks=\[\.\.\.\]"),
        ({"handlers": ConsoleLogger()}, r"handlers=\[\.\.\.\]"),
        ({"handlers": [ConsoleLogger]}, "needs an object"),
    ],
)
def test_an_argument_of_another_kind_is_named(arguments: dict[str, Any], says: str):
    with pytest.raises(TypeError, match=says):
        trainer(**arguments)


def test_a_metric_may_not_take_the_name_of_the_loss():
    with pytest.raises(ConfigurationError, match="choose another"):
        trainer(metrics={"loss": object()})
