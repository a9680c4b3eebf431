"""Names of other frameworks are answered with the right ones."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError
from pulsetrain.familiar_names import OF_CONFIG, OF_TRAINER
from pulsetrain.testing import tiny_loader, tiny_model

DOCS = Path(__file__).parents[2] / "docs"
PARAMETERS = set(inspect.signature(Trainer).parameters)
SETTINGS = set(inspect.signature(TrainingConfig).parameters)


@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [
        ("lr", "pass config=TrainingConfig(learning_rate=...)"),
        ("epochs", "pass config=TrainingConfig(max_epochs=...)"),
        ("max_epochs", "pass config=TrainingConfig(max_epochs=...)"),
        ("loss", "pass strategy=SupervisedStrategy('mse')"),
        ("device", "pass config=TrainingConfig(device=...)"),
        ("devices", "start processes with torchrun or `pulsetrain train --launch.nproc N`"),
        ("save_steps", "use the handler Checkpointer(folder, every=..., keep_last=...)"),
        ("val_dataloaders", "pass val_loader=..."),
        ("resume", "call train(resume='latest')"),
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
    for name, remedy in names.items():
        without_inner_calls = re.sub(r"(?!TrainingConfig)\b\w+\([^()]*\)", "", remedy)
        inner = re.search(r"TrainingConfig\((.*?)\)$", without_inner_calls)
        of_trainer = inner is None and kind is Trainer
        for keyword in re.findall(r"\b(\w+)=", without_inner_calls if inner is None else inner[1]):
            assert keyword in (PARAMETERS if of_trainer else SETTINGS), (name, remedy)


def names_in(page: str, header: str) -> set[str]:
    """The keywords in the first column of a table of docs/coming_from_PAGE.md."""
    table = (DOCS / f"coming_from_{page}.md").read_text().partition(f"\n| {header} |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")]
    named = {name for cell in cells if cell.startswith("`") for name in re.findall(r"`([a-z]\w+)(?:=[^`]*)?`", cell)}
    return named | {name for cell in cells for name in re.findall(r"[(, ](\w+)=", cell)}


OF_LIGHTNING = names_in("lightning", "Lightning's Trainer")
OF_TRANSFORMERS = names_in("transformers", "`TrainingArguments`")
OF_KERAS = names_in("keras", "Keras")


def test_the_tables_of_other_frameworks_have_keywords():
    assert {"max_steps", "devices", "callbacks", "ckpt_path"} <= OF_LIGHTNING
    assert {"output_dir", "save_strategy", "report_to", "adam_beta1"} <= OF_TRANSFORMERS
    assert {"epochs", "batch_size", "validation_data", "verbose"} <= OF_KERAS


@pytest.mark.parametrize("name", sorted(OF_LIGHTNING | OF_TRANSFORMERS | OF_KERAS))
def test_the_trainer_knows_each_keyword_in_the_tables_of_other_frameworks(name: str):
    assert name in PARAMETERS | OF_TRAINER.keys()


@pytest.mark.parametrize("name", sorted(OF_LIGHTNING | OF_TRANSFORMERS))
def test_the_configuration_knows_each_keyword_in_the_tables_of_other_frameworks(name: str):
    assert name in SETTINGS | PARAMETERS | OF_CONFIG.keys()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("ddp", "or `pulsetrain train --launch.nproc N`"),
        ("ddp_spawn", "or `pulsetrain train --launch.nproc N`"),
        ("auto", "leave it out"),
        ("single_device", "leave it out"),
        ("fsdp", "pass backend=TorchBackend(topology=Topology(shard=N))"),
        ("deepspeed_stage_2", "pass backend=TorchBackend(topology=Topology(shard=N))"),
        ("model_parallel", "pass backend=TorchBackend(topology=Topology(tensor=N))"),
        ("reward_modl", "did you mean 'reward_model'?"),
    ],
)
def test_a_strategy_of_lightning_is_answered_with_how_to_use_several_processes(name: str, remedy: str):
    with pytest.raises(ConfigurationError) as caught:
        Trainer(tiny_model(), tiny_loader(), strategy=name)
    assert str(caught.value).startswith(f"Trainer(strategy='{name}'): ")
    assert remedy in str(caught.value)
    assert ("optimised" in str(caught.value)) == ("did you mean" not in str(caught.value))


@pytest.mark.parametrize("arguments", [{"optimizer": "AdamW"}, {"config": TrainingConfig(optimizer="AdamW")}])
def test_a_name_of_an_optimizer_is_answered_with_its_spelling(arguments: dict[str, Any]):
    with pytest.raises(ConfigurationError, match=r"\(optimizer='AdamW'\): unknown; .*; did you mean 'adamw'\?$"):
        Trainer(tiny_model(), tiny_loader(), **arguments)
