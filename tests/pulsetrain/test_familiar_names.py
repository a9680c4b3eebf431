"""Names of other frameworks are answered with the right ones."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig, handlers
from pulsetrain.configuration.instantiate import instantiate
from pulsetrain.engine import ConfigurationError, Every
from pulsetrain.engine.argument_checks import remedies_of
from pulsetrain.engine.schedules import Cosine
from pulsetrain.engine.strategies import STRATEGIES
from pulsetrain.familiar_names import OF_CONFIG, OF_EVALUATION, OF_TRAIN, OF_TRAINER
from pulsetrain.testing import tiny_loader, tiny_model

DOCS = Path(__file__).parents[2] / "docs"
PARAMETERS = set(inspect.signature(Trainer).parameters)
SETTINGS = set(inspect.signature(TrainingConfig).parameters)


@pytest.mark.parametrize(
    ("kind", "keyword", "remedy"),
    [
        (Trainer, "lr", "pass config=TrainingConfig(learning_rate=...)"),
        (Trainer, "epochs", "pass config=TrainingConfig(max_epochs=...)"),
        (Trainer, "max_epochs", "pass config=TrainingConfig(max_epochs=...)"),
        (Trainer, "loss", "pass strategy=SupervisedStrategy('mse')"),
        (Trainer, "device", "pass config=TrainingConfig(device=...)"),
        (Trainer, "devices", "start processes with torchrun or `pulsetrain train --launch.nproc N`"),
        (Trainer, "save_steps", "use the handler Checkpointer(folder, every=..., keep_last=...)"),
        (Trainer, "val_dataloaders", "pass val_loader=..."),
        (Trainer, "resume", "call train(resume='latest')"),
        (Trainer, "val_loadr", "did you mean 'val_loader'?"),
        (TrainingConfig, "lr", "set learning_rate=..."),
        (TrainingConfig, "epochs", "set max_epochs=..."),
        (TrainingConfig, "max_epoch", "did you mean 'max_epochs'?"),
    ],
)
def test_a_keyword_of_the_trainer_or_the_configuration(kind: type, keyword: str, remedy: str):
    needed = (tiny_model(), tiny_loader()) if kind is Trainer else ()
    with pytest.raises(TypeError) as caught:
        kind(*needed, **{keyword: 1})
    assert str(caught.value).startswith(f"{kind.__name__}({keyword}=1): is not an argument; ")
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [
        ("epochs", "when making the Trainer, pass config=TrainingConfig(max_epochs=...)"),
        ("max_epochs", "when making the Trainer, pass config=TrainingConfig(max_epochs=...)"),
        ("ckpt_path", "pass resume='latest', or the path of a checkpoint"),
        ("val_loader", "when making the Trainer, pass val_loader=..."),
        ("resum", "did you mean 'resume'?"),
    ],
)
def test_a_keyword_of_train(keyword: str, remedy: str):
    trainer = Trainer(tiny_model(), tiny_loader(), config=TrainingConfig(progress=False))
    with pytest.raises(TypeError) as caught:
        trainer.train(**{keyword: 1})  # type: ignore[arg-type]
    assert str(caught.value) == f"Trainer.train({keyword}=1): is not an argument; {remedy}"
    assert [*inspect.signature(trainer.train).parameters] == ["resume", "wait"]


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [
        ("dataloaders", "pass loader=..."),
        ("eval_dataset", "pass loader=DataLoader(...)"),
        ("ckpt_path", "call load_checkpoint(path) before"),
        ("callbacks", "when making the Trainer, pass callbacks=..."),
        ("loadr", "did you mean 'loader'?"),
    ],
)
def test_a_keyword_of_an_evaluation(method: str, keyword: str, remedy: str):
    trainer = Trainer(tiny_model(), tiny_loader(), config=TrainingConfig(progress=False))
    with pytest.raises(TypeError) as caught:
        getattr(trainer, method)(**{keyword: 1})
    assert str(caught.value) == f"Trainer.{method}({keyword}=1): is not an argument; {remedy}"
    parameters = inspect.signature(getattr(trainer, method)).parameters
    assert "loader" in parameters
    assert not parameters.keys() & OF_EVALUATION.keys()


def test_each_remedy_of_train_names_a_parameter_of_the_trainer():
    for name, remedy in OF_TRAIN.items():
        passed = re.match(r"when making the Trainer, pass (\w+)=", remedy)
        assert passed is None or passed[1] in PARAMETERS, (name, remedy)


def test_a_missing_argument_of_a_method_names_the_trainer():
    trainer = Trainer(tiny_model(), tiny_loader(), config=TrainingConfig(progress=False))
    for method in (trainer.test, trainer.predict):
        with pytest.raises(TypeError, match=rf"^Trainer\.{method.__name__}\(\) missing .*: 'loader'$"):
            method()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [("loss_fn", "pass loss=..."), ("criterion", "pass loss=..."), ("los", "did you mean 'loss'?")],
)
def test_a_keyword_of_the_strategy(keyword: str, remedy: str):
    with pytest.raises(TypeError) as caught:
        SupervisedStrategy(**{keyword: "mse"})  # type: ignore[arg-type]
    assert str(caught.value) == f"SupervisedStrategy({keyword}='mse'): is not an argument; {remedy}"


@pytest.mark.parametrize(
    ("name", "keyword", "remedy"),
    [
        ("dpo", "ref_model", "pass reference=..."),
        ("kto", "betta", "did you mean 'beta'?"),
        ("cpo", "cpo_alpha", "pass sft_weight=..."),
        ("grpo", "num_generations", "pass group_size=..."),
        ("grpo", "beta", "pass kl_coef=..."),
        ("ppo", "gae_lambda", "pass lam=..."),
        ("ppo", "clip_range_vf", "pass value_clip_range=..."),
        ("reward_model", "center_rewards_coefficient", "pass center_coef=..."),
        ("sft", "label_smoothing", "pass loss_options=..."),
    ],
)
def test_a_keyword_of_a_strategy_of_language_models_or_policies(name: str, keyword: str, remedy: str):
    kind: Any = STRATEGIES[name]
    with pytest.raises(TypeError) as caught:
        kind(**{keyword: 1})
    assert str(caught.value) == f"{kind.__name__}({keyword}=1): is not an argument; {remedy}"


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_answers_keywords_that_it_does_not_have(name: str):
    kind: Any = STRATEGIES[name]
    parameters = inspect.signature(kind).parameters
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(nonsense=1\): is not an argument$"):
        kind(nonsense=1)
    assert not parameters.keys() & remedies_of(kind).keys()


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


@pytest.mark.parametrize(
    ("kind", "keyword", "remedy"),
    [
        (handlers.EarlyStopping, "monitor", "pass metric='val/loss'"),
        (handlers.EarlyStopping, "verbose", "leave it out"),
        (handlers.EarlyStopping, "restore_best_weights", "add the handler BestModel('val/loss', restore=True)"),
        (handlers.EarlyStopping, "check_finite", "leave it out, and add the handler NaNGuard()"),
        (handlers.BestModel, "load_best_model_at_end", "pass restore=True"),
        (handlers.Checkpointer, "monitor", "pass metric='val/loss'"),
        (handlers.Checkpointer, "dirpath", "pass folder=..."),
        (handlers.Checkpointer, "filename", "pass name=..."),
        (handlers.Checkpointer, "save_top_k", "pass keep_best=..., with metric='val/loss'"),
        (handlers.Checkpointer, "save_total_limit", "pass keep_last=..."),
        (handlers.Checkpointer, "every_n_epochs", "pass every=Every(epochs=1)"),
        (handlers.CSVLogger, "save_dir", "pass folder=..."),
        (handlers.LRMonitor, "log_momentum", "pass momentum=True"),
        (handlers.ReduceLROnPlateau, "min_delta", "pass threshold=..., threshold_mode='abs'"),
        (handlers.TimeLimit, "duration", "pass seconds='2h'"),
        (handlers.GradientMonitor, "log_every_n_steps", "pass every=Every(updates=100)"),
        (handlers.GradientMonitor, "every_n_epochs", "pass every=Every(updates=100)"),
        (handlers.LossSpikeGuard, "monitor", "pass metric='loss'"),
        (handlers.LossSpikeGuard, "save_freq", "pass every=Every(epochs=1) or Every(iterations=100)"),
    ],
)
def test_a_keyword_of_a_handler(kind: type, keyword: str, remedy: str):
    with pytest.raises(TypeError) as caught:
        kind(**{keyword: 1})
    assert str(caught.value) == f"{kind.__name__}({keyword}=1): is not an argument; {remedy}"


def test_a_handler_whose_every_is_a_number_is_not_given_an_every():
    with pytest.raises(TypeError, match=r"^EventRecorder\(every_n_epochs=1\): is not an argument$"):
        handlers.EventRecorder("unused", every_n_epochs=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", sorted(set(handlers.__all__) - {"Callback"}))
def test_each_remedy_names_a_parameter_that_the_handler_has(name: str):
    kind = getattr(handlers, name)
    parameters = inspect.signature(kind).parameters
    for keyword, remedy in remedies_of(kind).items():
        without_calls = re.sub(r"\b\w+\([^()]*\)", "", remedy)
        assert parameters.keys() >= set(re.findall(r"\b(\w+)=", without_calls)), (keyword, remedy)
        assert keyword not in parameters


@pytest.mark.parametrize("name", sorted(set(handlers.__all__) - {"Callback"}))
def test_each_value_that_a_remedy_writes_out_is_accepted(name: str, tmp_path: Path):
    kind = getattr(handlers, name)
    parameters = inspect.signature(kind).parameters
    needed = {"folder": tmp_path, "prompts": "a", "project": "p", "seconds": 60}
    needed |= {"schedule": Cosine(0.1, total_steps=10), "callbacks": [], "metric": "loss", "after_epoch": 1}
    given = {name: value for name, value in needed.items() if name in parameters}
    names = {"Every": Every, "BestModel": handlers.BestModel, "NaNGuard": handlers.NaNGuard}
    for remedy in set(remedies_of(kind).values()):
        _, _, other = remedy.partition("add the handler ")
        if other:
            eval(other, names)
            continue
        for argument, value in re.findall(r"(?:\b(\w+)=|\bor )('[^']*'|True|Every\(\w+=\d+\))", remedy):
            kind(**given | {argument or "every": eval(value, names)})


def test_a_configuration_answers_keywords_of_handlers_too():
    rule = r"handlers\[0\]\.init_args\.monitor: unknown argument of EarlyStopping; pass metric='val/loss'$"
    with pytest.raises(ConfigurationError, match=rule):
        instantiate({"class_path": handlers.EarlyStopping, "init_args": {"monitor": "val_loss"}}, "handlers[0]")


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


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("ddp", "leave it out, and start several processes with torchrun or `pulsetrain train --launch.nproc N`"),
        ("fsdp", "leave it out, start several .*, and set parallel: {shard: N}"),
        ("deepspeed_stage_2", "leave it out, start several .*, and set parallel: {shard: N}"),
        ("model_parallel", "leave it out, start several .*, and set parallel: {tensor: N}"),
    ],
)
def test_such_a_strategy_of_a_configuration_is_answered_too(name: str, remedy: str):
    rule = rf"^strategy: class_path='{name}': strategy is what is optimised, not how devices share the work; {remedy}$"
    with pytest.raises(ConfigurationError, match=rule):
        instantiate(name, "strategy", STRATEGIES)


def test_a_loss_in_place_of_a_strategy_is_answered_with_what_works():
    with pytest.raises(ConfigurationError) as caught:
        instantiate("huber", "strategy", STRATEGIES)
    assert str(caught.value).startswith("strategy: class_path='huber': is a loss; set ")
    remedy = str(caught.value).partition(": is a loss; set ")[2]
    assert instantiate(yaml.safe_load(remedy)["strategy"], "strategy", STRATEGIES).loss_name == "huber"


@pytest.mark.parametrize("arguments", [{"optimizer": "AdamW"}, {"config": TrainingConfig(optimizer="AdamW")}])
def test_a_name_of_an_optimizer_is_answered_with_its_spelling(arguments: dict[str, Any]):
    with pytest.raises(ConfigurationError, match=r"\(optimizer='AdamW'\): unknown; .*; did you mean 'adamw'\?$"):
        Trainer(tiny_model(), tiny_loader(), **arguments)
