"""Names of other frameworks are answered with the right ones."""

from __future__ import annotations

from typing import Any

import pytest

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError
from pulsetrain.familiar_names import OF_CONFIG, OF_TRAINER
from pulsetrain.testing import tiny_loader, tiny_model


@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [
        ("lr", "pass config=TrainingConfig(learning_rate=...)"),
        ("epochs", "pass config=TrainingConfig(max_epochs=...)"),
        ("max_epochs", "pass config=TrainingConfig(max_epochs=...)"),
        ("loss", "pass strategy=SupervisedStrategy('mse')"),
        ("device", "pass config=TrainingConfig(device=...)"),
        ("val_dataloaders", "pass val_loader=..."),
        ("val_loadr", "did you mean 'val_loader'?"),
    ],
)
def test_a_keyword_of_the_trainer(keyword: str, remedy: str):
    arguments: dict[str, Any] = {keyword: 1}
    with pytest.raises(TypeError) as caught:
        Trainer(tiny_model(), tiny_loader(), **arguments)
    assert str(caught.value).startswith(f"Trainer({keyword}=1): is not an argument; ")
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [("lr", "set learning_rate=..."), ("epochs", "set max_epochs=..."), ("max_epoch", "did you mean 'max_epochs'?")],
)
def test_a_keyword_of_the_configuration(keyword: str, remedy: str):
    arguments: dict[str, Any] = {keyword: 1}
    with pytest.raises(TypeError) as caught:
        TrainingConfig(**arguments)
    assert str(caught.value).startswith(f"TrainingConfig({keyword}=1): is not an argument; ")
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("fit", "call train()"),
        ("evaluate", "call validate(), or test(loader) for other data"),
        ("global_step", "read state.update"),
        ("current_epoch", "read state.epoch"),
    ],
)
def test_an_attribute_of_the_trainer(name: str, remedy: str):
    trainer = Trainer(tiny_model(), tiny_loader(), config=TrainingConfig(progress=False))
    with pytest.raises(AttributeError, match="Trainer has no attribute") as caught:
        getattr(trainer, name)
    assert remedy in str(caught.value)
    assert not hasattr(trainer, name)


def test_another_missing_attribute_has_pythons_own_message():
    trainer = Trainer(tiny_model(), tiny_loader(), config=TrainingConfig(progress=False))
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'nonsense'"):
        trainer.nonsense  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "names"), [(Trainer, OF_TRAINER), (TrainingConfig, OF_CONFIG)], ids=["trainer", "config"]
)
def test_each_remedy_names_what_exists(kind: type, names: dict[str, str]):
    import inspect
    import re

    own = set(inspect.signature(kind).parameters)
    settings = set(inspect.signature(TrainingConfig).parameters)
    for name, remedy in names.items():
        inner = re.search(r"TrainingConfig\((.*?)\)$", remedy)
        for keyword in re.findall(r"\b(\w+)=", remedy if inner is None else inner[1]):
            assert keyword in (settings if inner is not None or kind is TrainingConfig else own) | {"epochs"}, (
                name,
                remedy,
            )


def test_a_name_of_an_optimizer_is_answered_with_its_spelling():
    with pytest.raises(ConfigurationError, match="did you mean 'adamw'"):
        Trainer(tiny_model(), tiny_loader(), config=TrainingConfig(optimizer="AdamW"))
