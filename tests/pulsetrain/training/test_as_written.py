"""An error about what a setting became names the setting, as the user wrote it."""

from __future__ import annotations

import traceback
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError, TorchBackend
from pulsetrain.engine.errors import ArgumentTypeError
from pulsetrain.engine.schedules import build_schedule
from pulsetrain.testing import tiny_loader, tiny_model
from pulsetrain.training.as_written import as_written

INTERNAL = ("build_schedule", "create_optimizer", "create_functional", "resolve_optimizer", "Cosine(", "Precision(")


def refused(backend: Any = None, given: Any = None, **settings: Any) -> ConfigurationError:
    config = TrainingConfig(progress=False, **settings)
    model = tiny_model()
    with pytest.raises(ConfigurationError) as caught:
        Trainer(
            model,
            tiny_loader(),
            strategy=SupervisedStrategy("mse"),
            optimizer=given(model) if isinstance(given, FunctionType) else given,
            backend=backend,
            config=config,
        )
    return caught.value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cosin"}, "TrainingConfig(schedule='cosin'): unknown; choose one of "),
        (
            {"schedule": "exponential"},
            "TrainingConfig(schedule='exponential'): needs schedule_options={'gamma': ...}, ",
        ),
        (
            {"schedule": "step", "schedule_options": {"step_size": 0}},
            "TrainingConfig(schedule_options={'step_size': 0}): needs at least 1 ",
        ),
        (
            {"schedule": "cosine", "learning_rate": 0.1, "schedule_options": {"min_lr": 0.5}},
            "TrainingConfig(schedule_options={'min_lr': 0.5}): is above learning_rate=0.1",
        ),
        (
            {"schedule": "cosine", "min_lr_ratio": 0.1, "schedule_options": {"min_lr": 0.01}},
            "TrainingConfig(min_lr_ratio=0.1): schedule_options={'min_lr': 0.01} sets the lowest rate too",
        ),
        (
            {"schedule": "linear", "warmup_steps": 90},
            "TrainingConfig(warmup_steps=90): leaves nothing of the run's total_steps=",
        ),
        ({"optimizer": "adamx"}, "TrainingConfig(optimizer='adamx'): unknown; choose one of "),
        (
            {"optimizer": "sgd", "optimizer_options": {"momentum": 2.0}},
            "TrainingConfig(optimizer_options={'momentum': 2.0}): needs a number from 0",
        ),
        (
            {"optimizer": "adam", "optimizer_options": {"adam_beta1": 0.9, "betas": [0.9, 0.99]}},
            "TrainingConfig(optimizer_options={'adam_beta1': 0.9, 'betas': [0.9, 0.99]}): pass only one of them",
        ),
        (
            {"optimizer_options": {"layer_rates": {"haed": 0.1}}},
            "TrainingConfig(optimizer_options={\"layer_rates['haed']\": 0.1}): matches no parameter",
        ),
        ({"device": "cuda:97"}, "TrainingConfig(device='cuda:97'): is not on this machine"),
    ],
)
def test_a_setting_is_named(settings: dict[str, Any], message: str):
    error = refused(**settings)
    assert str(error).startswith(message)
    assert error.place == "TrainingConfig"
    assert error.argument in message


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"optimizer": "sgd", "optimizer_options": {"momentm": 0.9}}, "momentum"),
        ({"schedule": "wsd", "schedule_options": {"decay_step": 5}}, "decay_steps"),
    ],
)
def test_an_option_that_does_not_exist_is_answered_with_the_nearest(settings: dict[str, Any], nearest: str):
    assert str(refused(**settings)).endswith(f"; did you mean {nearest!r}?")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adamx", "Trainer(optimizer='adamx'): unknown; choose one of "),
        (lambda model: 3, "Trainer(optimizer=int): needs a name"),
        (list, "Trainer(optimizer=list): returned list; needs a name"),
        (
            lambda model: torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1),
            "Trainer(optimizer=SGD): lacks 4 trainable parameters of the model, '0.weight' first",
        ),
    ],
)
def test_an_argument_of_the_trainer_is_named(optimizer: Any, message: str):
    assert str(refused(given=optimizer)).startswith(message)


def test_options_beside_an_optimizer_that_was_made_already_are_named():
    error = refused(
        given=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), optimizer_options={"momentum": 0.9}
    )
    assert str(error).startswith("TrainingConfig(optimizer_options={'momentum': 0.9}): only an optimizer given by name")


def test_a_backend_that_computes_with_values_names_the_setting_too():
    backend = TorchBackend(functional=True)
    assert str(refused(backend, "adamx")).startswith("Trainer(optimizer='adamx'): unknown; choose one of ")
    error = refused(TorchBackend(functional=True), optimizer_options={"fused": True})
    assert str(error).startswith("TrainingConfig(optimizer_options={'fused': True}): ")


def test_a_model_without_anything_to_train_is_an_argument_of_the_trainer():
    with pytest.raises(ConfigurationError, match=r"^Trainer\(model=Tanh\): has no parameters"):
        Trainer(nn.Tanh(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=TrainingConfig(progress=False))


@pytest.mark.parametrize("backend", [None, TorchBackend, partial(TorchBackend, functional=True)])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear, "Trainer(model=Linear): needs an object, such as Linear(...)"),
        (tiny_loader(), "Trainer(model=DataLoader): needs a torch.nn.Module"),
    ],
    ids=["class", "loader"],
)
def test_what_is_not_a_model_is_an_argument_of_the_trainer(model: Any, message: str, backend: Any):
    with pytest.raises(ArgumentTypeError) as caught:
        Trainer(model, tiny_loader(), backend=None if backend is None else backend())
    assert str(caught.value) == message


def test_the_traceback_has_no_second_error_with_the_internal_name():
    shown = "".join(traceback.format_exception(refused(schedule="cosin")))
    messages = [line for line in shown.splitlines() if "Error: " in line]
    assert len(messages) == 1
    assert not any(name in messages[0] for name in INTERNAL)
    assert "in build_schedule" in shown  # the calls are all there


def test_a_function_that_the_user_calls_keeps_its_own_name():
    with pytest.raises(ConfigurationError, match=r"^build_schedule\(name='cosin'\)"):
        build_schedule("cosin", 0.1, total_steps=9)


def test_other_errors_pass_unchanged():
    error = ConfigurationError("needs more", "Part", size=3)
    with pytest.raises(ConfigurationError) as caught, as_written():
        raise error
    assert caught.value is error
