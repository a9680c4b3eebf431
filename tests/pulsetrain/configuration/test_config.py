"""TrainingConfig, its rules and its documentation; reading, overriding and comparing configuration files."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest

from pulsetrain import TrainingConfig
from pulsetrain.configuration.parse import STANDARD_HANDLERS, differences, read_config
from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.engine import Every
from pulsetrain.engine.errors import ConfigurationError

FIELDS = dataclasses.fields(TrainingConfig)
DOCUMENTED = inspect.cleandoc(TrainingConfig.__doc__ or "")  # since Python 3.13, the compiler removes the indentation


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


class TestTrainingConfig:
    @pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
    def test_every_setting_is_documented_with_its_default(self, field: dataclasses.Field[Any]) -> None:
        found = re.search(rf"^ {{4}}{field.name}: (.+(?:\n {{8}}.+)*) \[(.+)\]\.$", DOCUMENTED, re.MULTILINE)
        assert found is not None
        assert eval(found[2], {"Every": Every}) == default_of(field)

    def test_nothing_else_is_documented(self) -> None:
        arguments = DOCUMENTED.partition("Args:")[2].partition("Raises:")[0]
        assert re.findall(r"^ {4}(\w+):", arguments, re.MULTILINE) == [field.name for field in FIELDS]

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"max_epochs": 0}, "max_epochs=0.*whole number of at least 1"),
            ({"max_iterations": 1.5}, "max_iterations=1.5.*whole number of at least 1"),
            ({"max_updates": -1}, "max_updates=-1"),
            ({"max_tokens": True}, "max_tokens=True"),
            ({"max_epochs": 1, "max_tokens": 9}, r"\(max_epochs=1, max_tokens=9\): a run has one bound"),
            ({"optimizer": None}, "optimizer=None.*needs to be a name"),
            ({"device": None}, "device=None.*needs to be a name"),
            ({"schedule": 3}, "schedule=3.*a name or None"),
            ({"optimizer_options": None}, "optimizer_options=None.*a mapping"),
            ({"schedule_options": [1]}, r"schedule_options=\[1\].*a mapping"),
            ({"learning_rate": 0}, "learning_rate=0.*a number above 0"),
            ({"learning_rate": math.nan}, "learning_rate=nan"),
            ({"learning_rate": math.inf}, "learning_rate=inf"),
            ({"weight_decay": -0.1}, "weight_decay=-0.1.*0 or more"),
            ({"no_decay": "some"}, "no_decay='some'.*'auto' or None"),
            ({"warmup_steps": -1}, "warmup_steps=-1.*0 or more"),
            ({"min_lr_ratio": 1.1}, "min_lr_ratio=1.1.*from 0 to 1"),
            ({"accumulate": 0}, "accumulate=0.*at least 1"),
            ({"accumulate": None}, "accumulate=None.*at least 1"),
            ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0.*above 0"),
            ({"clip_grad_value": -1}, "clip_grad_value=-1.*above 0"),
            ({"precision": "fp8"}, "precision='fp8'.*one of fp32, bf16, fp16"),
            ({"compile": "yes"}, "compile='yes'.*True or False"),
            ({"seed": -1}, "seed=-1.*whole number"),
            ({"seed": 2**63}, f"seed={2**63}"),
            ({"validate_every": 100}, r"validate_every=100.*Every\(epochs=1\)"),
            ({"log_every_n_steps": 0}, "log_every_n_steps=0"),
            ({"run_dir": "runs/a", "save_every_n_epochs": 0}, "save_every_n_epochs=0"),
            ({"save_every_n_epochs": 1}, r"save_every_n_epochs=1\): needs run_dir"),
            ({"early_stopping_patience": 0}, "early_stopping_patience=0"),
            ({"no_decay": "auto", "optimizer_options": {"no_decay": "auto"}}, "no_decay='auto'.*give one of the two"),
            ({"schedule": None, "warmup_steps": 5}, r"warmup_steps=5\): has no effect where schedule=None"),
            ({"schedule": None, "min_lr_ratio": 0}, r"min_lr_ratio=0\): has no effect where schedule=None"),
            ({"schedule": None, "schedule_options": {"gamma": 1}}, r"schedule_options={'gamma': 1}\): has no effect"),
            ({"schedule_options": {3: 1}}, r"schedule_options={3: 1}\): needs the keyword as text, not 3"),
            ({"optimizer_options": {None: 1}}, r"optimizer_options={None: 1}\): needs the keyword as text"),
        ],
    )
    def test_bad_settings_are_refused(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=rf"TrainingConfig\(.*{message.removeprefix(chr(92) + '(')}"):
            TrainingConfig(**settings)

    @pytest.mark.parametrize(
        ("options", "keyword", "remedy"),
        [
            ("schedule_options", "name", "set schedule"),
            ("schedule_options", "learning_rate", "set learning_rate"),
            ("schedule_options", "total_steps", "set max_updates or max_epochs"),
            ("schedule_options", "warmup_steps", "set warmup_steps"),
            ("schedule_options", "min_lr_ratio", "set min_lr_ratio"),
            ("schedule_options", "T_0", "pass first_cycle"),
            ("schedule_options", "T_mult", "pass multiplier"),
            ("schedule_options", "eta_min", "pass min_lr"),
            ("optimizer_options", "model", "leave it out"),
            ("optimizer_options", "optimizer", "set optimizer"),
            ("optimizer_options", "name", "set optimizer"),
            ("optimizer_options", "learning_rate", "set learning_rate"),
            ("optimizer_options", "lr", "set learning_rate"),
            ("optimizer_options", "weight_decay", "set weight_decay"),
        ],
    )
    def test_an_option_that_belongs_elsewhere_is_refused(self, options: str, keyword: str, remedy: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            TrainingConfig(**{options: {keyword: 0.5}})  # type: ignore[arg-type]
        text = str(caught.value)
        assert text.startswith(f"TrainingConfig({options}={{{keyword!r}: 0.5}}): ")
        assert remedy in text

    @pytest.mark.parametrize(
        "settings",
        [{"seed": None}, {"seed": 2**63 - 1}, {"schedule": None}, {"validate_every": None}, {"min_lr_ratio": 0}],
    )
    def test_the_limits_themselves_are_accepted(self, settings: dict[str, Any]) -> None:
        config = TrainingConfig(**settings)
        assert {name: getattr(config, name) for name in settings} == settings


class TestNumbers:
    @pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "0.0003", "3E-4", "+3e-4", ".3e-3"])
    def test_an_exponent_needs_no_point(self, text: str) -> None:
        assert load_yaml(text) == 0.0003

    @pytest.mark.parametrize(
        ("text", "value"), [("3", 3), ("1_000", 1000), ("3e", "3e"), ("e4", "e4"), ("3.1.2", "3.1.2")]
    )
    def test_other_words_stay_unchanged(self, text: str, value: Any) -> None:
        assert load_yaml(text) == value
        assert type(load_yaml(text)) is type(value)


def read(folder: Path, text: str, **overrides: str) -> dict[str, Any]:
    path = folder / "small.yaml"
    path.write_text(text)
    return read_config(path, {key.replace("__", "."): value for key, value in overrides.items()})


LEAST = "model: model.Net\ndata: data.loaders\n"


class TestReading:
    def test_omitted_settings_have_defaults(self, tmp_path: Path) -> None:
        config = read(tmp_path, LEAST)
        assert config["run"] == "runs/small-{n}"
        assert config["strategy"] == "supervised"
        assert config["handlers"] == list(STANDARD_HANDLERS)

    def test_a_run_that_brings_its_own_checkpointer_gets_no_second_one(self, tmp_path: Path) -> None:
        config = read(tmp_path, LEAST, training__save_every_n_epochs="2")
        assert config["handlers"] == [name for name in STANDARD_HANDLERS if name != "Checkpointer"]

    def test_an_override_reaches_any_depth_and_keeps_its_siblings(self, tmp_path: Path) -> None:
        text = LEAST + "training: {validate_every: {epochs: 1}, seed: 1}\n"
        config = read(tmp_path, text, training__validate_every__updates="20", model__init_args__width="8")
        assert config["training"] == {"validate_every": {"epochs": 1, "updates": 20}, "seed": 1}
        assert config["model"] == {"class_path": "model.Net", "init_args": {"width": 8}}

    @pytest.mark.parametrize("before", ["null", "{}", "{epochs: 1}"])
    def test_an_override_replaces_a_mapping_whole(self, tmp_path: Path, before: str) -> None:
        text = LEAST + f"training: {{validate_every: {before}}}\n"
        config = read(tmp_path, text, training__validate_every="{updates: 20}")
        assert config["training"]["validate_every"] == {"updates": 20}

    def test_an_override_reaches_into_null(self, tmp_path: Path) -> None:
        text = LEAST + "training: {validate_every: null}\n"
        config = read(tmp_path, text, training__validate_every__updates="20")
        assert config["training"]["validate_every"] == {"updates": 20}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a: [1\nb: 2", "not valid YAML.*line 2"),
            ("run: a\nrun: b", "the key 'run' is given twice"),
            ("- a", "needs the sections run, model"),
            ("", "needs the sections run, model"),
            (LEAST + "trainig: {}", "trainig: unknown section.*did you mean 'training'"),
            ("data: data.loaders", "section 'model' is missing"),
            ("model: null\ndata: data.loaders", "section 'model' is missing"),
            (LEAST + "training: 3", "training=3: needs a mapping of settings"),
            (LEAST + "handlers: CSVLogger", "handlers='CSVLogger': needs a list"),
            (LEAST + "metrics: [a]", r"metrics=\['a'\]: needs a mapping"),
            (LEAST + "run: 3", "run=3: needs a folder"),
        ],
    )
    def test_a_bad_file_is_refused(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            read(tmp_path, text)

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("trainig__x", "3", "--trainig.x: unknown section.*did you mean 'training'"),
            ("handlers__0", "3", "--handlers.0: handlers is a list; set it as a whole"),
            ("run__x", "3", "--run.x: run is 'runs/a', not a mapping"),
            ("training____x", "3", "--training..x: an empty name"),
            ("training__x", "[1", r"--training.x '\[1': not valid YAML"),
        ],
    )
    def test_a_bad_override_is_refused(self, tmp_path: Path, key: str, value: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            read(tmp_path, LEAST + "run: runs/a\nhandlers: [CSVLogger]\n", **{key: value})

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"nothing.yaml: there is no such file"):
            read_config(tmp_path / "nothing.yaml", {})


def test_differences_name_the_setting_and_both_values() -> None:
    before = {"training": {"seed": 0, "gone": 1}, "handlers": [{"a": 1}, "b"], "same": 1}
    now = {"training": {"seed": 2, "new": 3}, "handlers": [{"a": 2}, "b"], "same": 1}
    assert list(differences(before, now)) == [
        "training.seed: 0 -> 2",
        "training.gone: 1 -> None",
        "training.new: None -> 3",
        "handlers[0].a: 1 -> 2",
    ]
